"""`forebay models quantize`: what it writes is served with the tokens of `--quantization`, or one line and nothing."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forebay.cli.main import main
from forebay.config.resolve import resolve
from forebay.engine.loop.build import build_engine
from forebay.models import quantized_copy
from tests.engine.starts import PROMPTS, tokens_of

MAKE = ["models", "make", "--like", "qwen3", "--hidden-size", "64", "--num-layers", "2"]


@pytest.fixture
def model(tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "here" / "tiny"
    assert main([*MAKE, "--out", str(path)]) == 0
    capsys.readouterr()
    return path


def tokens(path: Path, **flags: Any) -> list[list[int]]:
    shape = {"kv_cache_bytes": "4MiB", "context_length": 64, "max_running_requests": 8}
    asked = {"model": str(path), "dtype": "float32", **shape}
    core, _ = build_engine(resolve({**asked, **flags}).engine)
    return tokens_of(core, PROMPTS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_quantize_writes_a_folder_with_the_tokens_of_the_original_quantized(
    form: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "made"
    assert main(["models", "quantize", str(model), "--to", form, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert "of weights in" in captured.err
    assert list(out.parent.iterdir()) == [out]
    assert tokens(out) == tokens(model, quantization=form)
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{model}", "--to", "int4"], "where to"),
        (["{model}", "--out", "{new}"], "to which form"),
        (["--to", "int4", "--out", "{new}"], "say what"),
        (["{model}", "--to", "int3", "--out", "{new}"], "--to"),
        (["{model}", "--to", "int4", "--out", "{model}"], "is there already"),
        (["{new}", "--to", "int4", "--out", "{new}"], "there is no model at"),
        (["{here}", "--to", "int4", "--out", "{new}"], "no model.safetensors"),
        (["{embedded}", "--to", "int4", "--out", "{new}"], "is a GGUF file"),
        (["{model}", "--to", "int4", "--out", "/proc/new"], "/proc has 0 B free"),
    ],
)
def test_quantize_what_cannot_be_written_is_one_line_and_leaves_nothing(
    words: list[str],
    message: str,
    model: Path,
    embedded_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"model": model, "here": model.parent, "new": tmp_path / "new", "embedded": embedded_model}
    assert main(["models", "quantize", *(word.format(**paths) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [model.parent]
    assert list(model.parent.iterdir()) == [model]


class _Usage(NamedTuple):
    free: int


@pytest.mark.quick(1)
@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_quantize_disk_without_room_is_one_line_and_leaves_nothing(
    when: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(1 << 20))
    else:
        monkeypatch.setattr(quantized_copy, "write_safetensors", full)
    assert main(["models", "quantize", str(model), "--to", "int4", "--out", str(tmp_path / "made")]) == 2
    assert ("has 1.0 MiB free" if when == "before" else "No space left") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model.parent]
