"""`forebay models make`: what it writes can be served, and what it cannot write is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cli.main import main
from forebay.families.checkpoint import open_checkpoint
from forebay.text.tokenizer import Tokenizer

SMALL = ["--hidden-size", "32", "--num-layers", "3"]


def test_it_writes_a_folder_that_can_be_opened(
    tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "tiny"
    words = ["models", "make", "--like", "lfm2", "--out", str(target), *SMALL, "--set", "conv_L_cache=4", "tiny"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(target)
    assert "lfm2: 3 layers, 1.6 M weights, 3.1 MiB" in captured.err
    checkpoint = open_checkpoint(target)
    assert (checkpoint.config.num_layers, checkpoint.config.conv_width) == (3, 4)
    assert len(checkpoint.config.eos_token_ids) > 0
    chat = [{"role": "user", "content": "hello"}]
    assert Tokenizer.from_path(target).encode_chat(chat) == Tokenizer.from_path(embedded_model).encode_chat(chat)
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "--like"),
        (["--like", "lfm2"], "plain name"),
        (["a/b", "--like", "lfm2"], "plain name"),
        (["x", "--like", "gpt2"], "no small model like 'gpt2'; there are "),
        (["x", "--like", "lfm2", "--out", "{taken}"], "is there already"),
        (["x", "--like", "lfm2", "--out", "{new}", "--hidden-size", "100"], "100 does not divide"),
        (["x", "--like", "lfm2", "--out", "{new}", "--set", "conv_L_cache"], "FIELD=VALUE"),
        (["x", "--like", "lfm2", "--out", "{new}", "--set", "conv_L_cache=1"], "conv_L_cache"),
        (["x", "--like", "lfm2", "--out", "{new}", "--dtype", "int8"], "--dtype"),
        (["x", "--like", "lfm2", "--out", "/proc/new"], "cannot be written"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    paths = {"taken": str(taken), "new": str(tmp_path / "new")}
    assert main(["models", "make", *(word.format(**paths) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [taken]
    assert list(taken.iterdir()) == []
