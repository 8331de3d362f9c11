"""`forebay generate`: a prompt is the same from wherever it comes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from forebay.cli.main import main
from tests.engine.conftest import make_chat_model

SMALL = ["--dtype=float32", "--num-threads=1", "--kv-cache-bytes=4MiB", "-n", "12", "--temp=0"]


@pytest.mark.parametrize("words", [[], pytest.param(["-"], marks=pytest.mark.slow)], ids=["nothing", "-"])
def test_generate_continues_a_piped_prompt_as_that_of_an_argument(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(make_chat_model(tmp_path, context_length=256).path), *SMALL]
    assert main([*command, "hello"]) == 0
    said = capsys.readouterr().out
    assert said.strip()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert main([*command, *words]) == 0
    assert capsys.readouterr().out == said
