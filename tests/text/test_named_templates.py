"""Checkpoints with several named chat templates: the fitting one is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.text import tokenizer_files
from forebay.text.tokenizer import Tokenizer
from tests.text.test_chat_template import ASK, InThisProcess
from tests.text.tiny_tokenizer import tiny_metadata, tiny_tokenizer

DEFAULT = "{{ messages[0].content }}"
NAMED = {"tool_use": "tools: {{ tools | length }}", "rag": "documents: {{ documents | length }}"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.text.chat_template.TemplateProcess", InThisProcess)


def _listed(folder: Path) -> None:
    listed = [{"name": name, "template": source} for name, source in {"default": DEFAULT, **NAMED}.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))


def _in_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    for name, source in NAMED.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)


def _in_gguf(folder: Path) -> dict[str, Any]:
    named = {f"tokenizer.chat_template.{name}": source for name, source in NAMED.items()}
    return {**tiny_metadata(600, DEFAULT), **named}


@pytest.mark.parametrize("kind", [_listed, _in_files, _in_gguf])
def test_named_templates_the_fitting_one_is_rendered(kind: Any, tmp_path: Path) -> None:
    if kind is _in_gguf:
        tokenizer = Tokenizer.from_gguf(_in_gguf(tmp_path))
        own = Tokenizer.from_gguf(_in_gguf(tmp_path), "own")
    else:
        layout = json.loads(tiny_tokenizer(600)._backend.whole().to_str())
        layout["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
        kind(tmp_path)
        tokenizer = Tokenizer.from_path(tmp_path)
        own = Tokenizer.from_path(tmp_path, "own")
    assert tokenizer.render(ASK) == "a<b"
    assert tokenizer.render(ASK, tools=[]) == tokenizer.render(ASK, tools=None) == "a<b"
    assert tokenizer.render(ASK, tools=[TOOL]) == "tools: 1"
    assert tokenizer.render(ASK, documents=[{"text": "d"}, {"text": "e"}]) == "documents: 2"
    assert own.render(ASK, tools=[TOOL]) == "own", "the operator's template replaces all"
    tokenizer.check_chat_template()


def test_named_template_that_does_not_compile_is_refused() -> None:
    metadata = {**tiny_metadata(600, DEFAULT), "tokenizer.chat_template.tool_use": "{% if"}
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer.from_gguf(metadata).check_chat_template()
    with pytest.raises(ModelError, match=r"tokenizer.chat_template.rag is a int"):
        tokenizer_files.from_gguf({**metadata, "tokenizer.chat_template.rag": 3})


def test_named_templates_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'rag' is not a text"):
        tokenizer_files._named_templates(tmp_path, {"chat_template": [{"name": "rag", "template": 3}]})
