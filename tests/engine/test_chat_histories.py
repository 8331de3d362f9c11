"""Conversations of `LLM.chat` and `AsyncEngine.chat`, in the forms in which programs have them."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.engine.client.writing import chat_prompt
from forebay.text.answers.probes import find_formats
from forebay.text.tokenizer import Tokenizer
from tests.text.answers import templates
from tests.text.test_chat_template import InThisProcess
from tests.text.tiny_tokenizer import tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
USER = {"role": "user", "content": "Hi."}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.text.chat_template.TemplateProcess", InThisProcess)


def shown(template: str, messages: str | list[dict[str, Any]], **variables: Any) -> str:
    """Return the prompt as text, once with places to go on from, and once without."""
    tokenizer: Tokenizer = tiny_tokenizer(600, template)
    found = find_formats(tokenizer)
    given = {name: list(value) for name, value in variables.items()}
    chats = [chat_prompt(messages, tokenizer, found, given, with_places=places) for places in (True, False)]
    assert chats[0].token_ids == chats[1].token_ids
    assert given == variables
    return tokenizer.decode(chats[0].token_ids, skip_special_tokens=False)


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize("template", [templates.LLAMA, templates.GIGACHAT, templates.QWEN25])
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_chat_prompt_calls_are_shown_as_the_template_takes_them(template: str, arguments: Any) -> None:
    """Llama 3 refuses two calls of a message, GigaChat 3 drops the second; arguments come as text, as clients have
    them."""
    calls = [call("weather", arguments, id="a"), call("time", arguments, id="b")]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": f"result {each['id']}"} for each in calls]
    text = shown(template, [USER, {"role": "assistant", "tool_calls": calls}, *results, USER], tools=TOOLS)
    for word in ('"weather"', '"time"', '{"city": "Oslo"}', "result a", "result b"):
        assert word in text, word


def test_chat_prompt_tools_are_told_of_by_a_template_that_writes_nothing_of_them() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert '"weather"' in shown(template, "Hi.", tools=TOOLS)
    assert shown(template, "Hi.") == "user: Hi.\n"


def test_chat_prompt_system_text_is_put_where_the_template_takes_it() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert "Be brief." in shown(template, [USER, {"role": "system", "content": "Be brief."}])


def test_chat_prompt_call_without_a_name_raises() -> None:
    with pytest.raises(InvalidRequest, match=r"call 0 of a message has no function\.name"):
        shown(templates.QWEN25, [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}])
