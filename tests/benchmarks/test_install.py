"""What installs the peers: how far it is, what it says of an error, and nothing by halves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import install


def script(*lines: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"for line in {lines!r}: print(line)\nraise SystemExit({code})"]


def test_compiling_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    install.compile_with_progress(script(*(f"[{i}/22] Building" for i in range(1, 23)), "a warning [5/9]"))
    assert capsys.readouterr().out.splitlines() == [f"peers: llama.cpp, {n} of 22 files" for n in (10, 20, 22)]


def test_what_the_compiler_said_last_is_shown_where_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        install.compile_with_progress(script(*(f"line {i};" for i in range(100)), "error: no", code=1))
    said = capsys.readouterr().err
    assert "error: no" in said
    assert "line 0;" not in said


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), install.whole_or_nothing(tmp_path / "peer") as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with install.whole_or_nothing(tmp_path / "peer") as folder:
        (folder / "all").touch()
    assert (tmp_path / "peer" / "all").is_file()


def test_the_folder_of_models_is_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs write nowhere else: on a fresh machine there was no folder of models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(install, "INSTALLERS", {"peer": lambda isa, jobs: None})
    monkeypatch.setattr(sys, "argv", ["install", "peer"])
    install.main()
    assert install.places.q4_0().parent.is_dir()


def test_install_peer_fails_installs_others_and_exits_nonzero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def fails(isa: object, jobs: int) -> None:
        raise subprocess.CalledProcessError(7, ["convert", "model"])

    def lacks(isa: object, jobs: int) -> None:
        install.only(tmp_path, "*.tar.gz")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peers = {"first": fails, "second": lacks, "third": lambda isa, jobs: done.append("third")}
    monkeypatch.setattr(install, "INSTALLERS", peers)
    monkeypatch.setattr(sys, "argv", ["install"])
    with pytest.raises(SystemExit, match="first is not installed: `convert model` failed with code 7") as ended:
        install.main()
    assert "second is not installed: FileNotFoundError" in str(ended.value)
    assert done == ["third"]


@pytest.mark.parametrize("name", list(install.places.RANDOM_MODELS))
def test_make_model_converter_options_suit_architecture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's converter rejects --no-mtp for an architecture without a draft head."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "run", lambda *words, env=None: commands.append(tuple(map(str, words))))
    kinds: list[str] = []
    monkeypatch.setattr(install, "quantize", lambda source, target, kind: kinds.append(kind))
    install.make_model(tmp_path / "model.gguf", install.places.RANDOM_MODELS[name])
    (convert,) = [words for words in commands if any(word.endswith("convert_hf_to_gguf.py") for word in words)]
    make = next(words for words in commands if "make" in words)
    assert ("--no-mtp" in convert) == ("qwen3_5_text" in make)
    assert kinds == ["MXFP4_MOE" if "gpt_oss" in make else "Q4_K_M"]
