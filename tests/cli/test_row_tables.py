"""Tables whose rows are read from the files take no memory, in what the tools say of a model and in its copies."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from forebay.cli.main import main
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import open_checkpoint

PART = ".ngram_embedding."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    request.getfixturevalue("embedded_model")
    path = tmp_path_factory.mktemp("row-tables") / "tiny"
    words = ["--like", "qwen4_exp_text", "--hidden-size", "64", "--num-layers", "4"]
    assert main(["models", "make", *words, "--out", str(path)]) == 0
    return path


def test_weight_shapes_leave_out_tables_that_are_read_by_row(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    tables = [tensor for name, tensor in checkpoint.tensors.items() if PART in name]
    assert tables
    assert checkpoint.num_table_bytes == sum(tensor.num_bytes for tensor in tables) > 0
    every = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    of_tables = sum(math.prod(tensor.shape) for tensor in tables)
    assert checkpoint.weight_shapes().num_parameters == every - of_tables
    assert checkpoint.weight_shapes().num_parameters == read_shape(model, False).weights.num_parameters


def test_models_inspect_prints_tables_apart_from_the_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", str(model)]) == 0
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "read by row from the files, not in memory" in lines["tables"]
    assert "memory, as stored" not in lines
    assert "narrow" not in lines["memory, float32"]


class _Usage(NamedTuple):
    free: int


def test_models_quantize_needs_room_for_the_tables(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["models", "quantize", str(model), "--to", "int4", "--out", str(tmp_path / "made")]
    assert main(words) == 0
    size = sum(path.stat().st_size for path in (tmp_path / "made").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "made")
    capsys.readouterr()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(size))
    assert main(words) == 2
    assert "free, and the model needs up to" in capsys.readouterr().err
