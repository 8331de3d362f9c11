"""Templates see the variables that transformers passes, and write the same text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from forebay.text.chat_template import ChatTemplate
from tests.text.answers.templates import MANNERS
from tests.text.in_process import templates_in_this_process

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <there>."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "More."},
    ],
]
CONDITIONS = [
    "{% if tools is not none %}tools{% else %}none{% endif %}",
    "{% if tools is none %}none{% endif %}{% if not tools is defined %}undefined{% endif %}",
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}",
    "{% if documents is not none %}{{ documents | length }}{% endif %}{{ documents is defined }}",
    "{% if tools is not none and (tools | length > 0) %}{{ tools | tojson }}{% endif %}",
    "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking is defined }}{{ add_generation_prompt }}",
    "{{ tools | tojson(false, 2, (',', ':'), true) }}{{ custom_tools is defined }}{{ tools_in_user_message }}",
]
SOURCES = {**{name: manner.template for name, manner in MANNERS.items()}, **{text: text for text in CONDITIONS}}


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with templates_in_this_process():
        yield


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS}, {"documents": [{"title": "t", "text": "x"}]}], ids=list)
def test_chat_template_render_any_conversation_equals_transformers(source: str, variables: dict[str, Any]) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(source, names)
    for messages in CONVERSATIONS:
        for prompted in (False, True):
            (wanted,), _ = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=prompted, **variables, **names
            )
            assert template.render(messages, add_generation_prompt=prompted, **variables) == wanted
