"""Whatever says that a model can be served refuses one that a server refuses, in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.cli.main import main
from forebay.engine.lifecycle.served_files import check_served_files
from forebay.text.tokenizer import Tokenizer
from tests.formats.gguf_files import TOKENIZER, llama_metadata, llama_tensors, write_gguf

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pre-tokenizer": ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'"),
    "tokenizer": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
    "chat template": ({"tokenizer.chat_template": "{% if"}, "the chat template"),
    "more tokens than the model has": (
        {"tokenizer.ggml.tokens": [*map(str, range(33)), "a", "b", "ab"]},
        "beyond the model's vocabulary",
    ),
}


def gguf(path: Path, **extra: Any) -> Path:
    return write_gguf(path, llama_metadata(), llama_tensors("Q8_0"), type_name="Q8_0", extra={**TOKENIZER, **extra})


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFUSED)
def test_inspect_and_plan_refuse_what_a_server_refuses(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra, message = REFUSED[name]
    path = gguf(tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelError) as of_server:
        Tokenizer.from_path(path).check_chat_template()
    assert message in of_server.value.message
    for words in (["models", "inspect"], ["plan"]):
        assert main([*words, str(path)]) == 2
        assert of_server.value.message in capsys.readouterr().err


def test_inspect_and_plan_accept_a_sound_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path / "m.gguf")
    for words in (["models", "inspect"], ["plan"]):
        assert main([*words, str(path)]) == 0
        assert not capsys.readouterr().err


def test_check_served_files_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_served_files(tmp_path)
    check_served_files(tmp_path / "config.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="tokenizer"):
        check_served_files(tmp_path / "config.json")


def test_check_served_files_operators_template_counts(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": "{% if"})
    check_served_files(path, "{{ messages }}")
