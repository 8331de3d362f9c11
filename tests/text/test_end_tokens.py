"""Tokens that end an answer, as the tokenizer's files and chat templates of the kinds that are published name them."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.requests.end_tokens import EndTokens
from forebay.text.end_tokens import end_tokens
from forebay.text.tokenizer import Tokenizer
from tests.text.answers import templates
from tests.text.test_chat_template import InThisProcess
from tests.text.tiny_tokenizer import TEMPLATE, tiny_metadata

ENDOFTEXT, START, END = 0, 1, 2
LOOP = "{% for message in messages %}"
CASES: dict[str, tuple[str | None, set[int]]] = {
    "no template": (None, {ENDOFTEXT}),
    "the turn's own end": (TEMPLATE, {ENDOFTEXT, END}),
    "the end on a line of its own": (
        LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}\n<|im_end|>\n{% endfor %}",
        {ENDOFTEXT, END},
    ),
    "no end: the next turn of the user": (
        LOOP + "{{ '<|im_end|>' if message.role == 'user' else '<|im_start|>' }}{{ message.content }}{% endfor %}",
        {ENDOFTEXT, END},
    ),
    "turns of plain text": (LOOP + "{{ message.role }}: {{ message.content }}\n{% endfor %}", {ENDOFTEXT}),
    "eos_token behind it": (LOOP + "{{ message.content }}{{ eos_token }}{% endfor %}", {ENDOFTEXT}),
    "a token that also stands before the last words": (
        LOOP
        + "{% if message.reasoning_content %}{{ message.reasoning_content }}<|im_end|>{% endif %}"
        + "{{ message.content }}<|im_end|>{% endfor %}",
        {ENDOFTEXT},
    ),
    "thoughts that are shown": (
        LOOP
        + "<|im_start|>{{ message.role }}\n{{ message.reasoning_content or '' }}{{ message.content }}<|im_end|>\n"
        + "{% endfor %}",
        {ENDOFTEXT, END},
    ),
    "it refuses answers": ("{{ raise_exception('no') }}", {ENDOFTEXT}),
    "it does not show answers": ("<|im_start|>{{ messages[0].content }}<|im_end|>", {ENDOFTEXT}),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.text.chat_template.TemplateProcess", InThisProcess)


def tokenizer_of(template: str | None, **metadata: Any) -> Tokenizer:
    return Tokenizer.from_gguf({**tiny_metadata(600, template), "tokenizer.ggml.eos_token_id": ENDOFTEXT, **metadata})


@pytest.mark.parametrize("case", CASES)
def test_end_tokens_are_those_of_the_tokenizer_and_the_template(case: str) -> None:
    template, expected = CASES[case]
    assert set(end_tokens(tokenizer_of(template))) == expected


def test_end_tokens_each_has_its_reason() -> None:
    assert end_tokens(tokenizer_of(TEMPLATE)) == {
        ENDOFTEXT: "the tokenizer's eos_token",
        END: "the chat template writes it behind an assistant's message",
    }


def test_end_tokens_end_of_a_channel_is_none() -> None:
    """As gpt-oss has it, in a template that writes the end of a channel behind the last message."""
    from forebay.formats.strings import Strings

    metadata = tiny_metadata(600)
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|end|>", "<|return|>", "<|call|>"]
    types = [*metadata["tokenizer.ggml.token_type"], 3, 3, 3]
    more = {"tokenizer.ggml.tokens": Strings.of(tokens), "tokenizer.ggml.token_type": types}
    template = LOOP + "<|im_start|>{{ message.role }}{{ message.content }}<|end|>{% endfor %}"
    assert set(end_tokens(tokenizer_of(template, **more))) == {ENDOFTEXT}
    types[-1] = 1  # a vocabulary without calls has no channels
    assert set(end_tokens(tokenizer_of(template, **more))) == {ENDOFTEXT, len(tokens) - 3}


EACH = "{% for m in messages %}<|im_start|>{{ m.role }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
SHOWN = {  # how a template writes calls, its end of a turn, and whether that ends an answer
    "GigaChat 3: a message of its own for each call": (templates.GIGACHAT, "<|message_sep|>", False),
    "between two calls, and the template wants no text": (
        EACH + "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + CALLS + "<E>{% endfor %}<E>{% endfor %}",
        "<E>",
        False,
    ),
    "behind the text, before one call of text": (
        EACH
        + "{{ m.content }}<E>{% for c in m.tool_calls or [] %}{% if loop.length > 1 %}{{ raise_exception('one') }}"
        + "{% endif %}{{ c.function.name }}{{ '' + c.function.arguments }}<E>{% endfor %}{% endfor %}",
        "<E>",
        False,
    ),
    "Qwen 2.5": (templates.QWEN25, "<|im_end|>", True),
    "Qwen 3 Coder": (templates.QWEN3_CODER, "<|im_end|>", True),
    "Llama 3: one call of a message": (templates.LLAMA, "<|eot_id|>", True),
    "Nemotron Nano 2": (templates.NEMOTRON, "<SPECIAL_12>", True),
    "Gemma 4: calls in front of the text": (templates.GEMMA4, "<turn|>", True),
}


@pytest.mark.parametrize("case", SHOWN)
def test_end_tokens_end_within_a_turn_of_calls_is_none(case: str) -> None:
    from forebay.formats.strings import Strings

    template, spelled, ends = SHOWN[case]
    metadata = tiny_metadata(600)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    more: dict[str, Any] = {}
    if spelled not in tokens:
        types = [*metadata["tokenizer.ggml.token_type"], 3]
        tokens.append(spelled)
        more = {"tokenizer.ggml.tokens": Strings.of(tokens), "tokenizer.ggml.token_type": types}
    expected = {ENDOFTEXT, tokens.index(spelled)} if ends else {ENDOFTEXT}
    assert set(end_tokens(tokenizer_of(template, **more))) == expected


def test_end_tokens_of_an_engine_are_a_union_within_the_vocabulary() -> None:
    ends = EndTokens([2, 9, -1], vocab_size=9)
    ends.add([5, 2, 10])
    assert ends.ids == (2, 5)
