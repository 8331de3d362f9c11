"""Where conversations are likely to be resumed, in text and in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.text.resumption import MAX_BREAKPOINTS, MAX_LAST_MESSAGES, Breakpoint, places
from forebay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("patience")

SYSTEM = {"role": "system", "content": "Answer in verse, and never in more than four lines."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "The air scatters what is short,\nso blue is what it lets us sort."},
    {"role": "user", "content": "And at dusk? caf\u00e9 \u2615 \u65e5\u672c"},
]


@pytest.fixture(scope="module")
def embedded(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_path(embedded_model)


def beginnings(tokenizer: Tokenizer, talk: list[dict[str, Any]], **options: Any) -> list[str]:
    """The text before each checkpoint."""
    prompt = tokenizer.encode_chat_prompt(talk, **options)
    assert prompt.token_ids == tokenizer.encode_chat(talk)
    return [tokenizer.decode(prompt.token_ids[:n], skip_special_tokens=False) for n in prompt.resume_points]


def test_ends_of_messages_are_found_through_the_template(embedded: Tokenizer) -> None:
    """C18: the shared beginning, and the last messages, from which a user who edits goes on."""
    head = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    question = f"{head}<|im_start|>user\n{TALK[1]['content']}<|im_end|>\n"
    answer = f"{question}<|im_start|>assistant\n{TALK[2]['content']}<|im_end|>\n"
    assert beginnings(embedded, TALK) == [head, f"{head}<|im_start|>user\n", question, answer]


def test_a_system_prompt_that_the_template_writes_itself_is_shared_too(embedded: Tokenizer) -> None:
    (shared,) = beginnings(embedded, [{"role": "user", "content": "Hi"}])
    assert shared.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert shared.endswith("<|im_start|>user\n")


def test_the_next_turn_and_another_conversation_begin_with_the_same_tokens(embedded: Tokenizer) -> None:
    prompt = embedded.encode_chat_prompt(TALK)
    other = embedded.encode_chat([SYSTEM, {"role": "user", "content": "What is a forebay?"}])
    edited = embedded.encode_chat([*TALK[:3], {"role": "user", "content": "And at noon?"}])
    assert prompt.token_ids[: prompt.resume_points[1]] == other[: prompt.resume_points[1]]
    assert prompt.token_ids[: prompt.resume_points[-1]] == edited[: prompt.resume_points[-1]]


def test_a_clients_breakpoint_is_where_its_part_ends(embedded: Tokenizer) -> None:
    talk = [{"role": "user", "content": "A long document. Then the question?"}]
    found = beginnings(embedded, talk, breakpoints=[Breakpoint(0, len("A long document."))])
    assert found[-1].endswith("<|im_start|>user\nA long document.")
    whole = beginnings(embedded, talk, breakpoints=[Breakpoint(0, len(talk[0]["content"]))])
    assert whole[-1].endswith("Then the question?<|im_end|>\n")


def test_spellings_of_control_tokens_in_a_text_move_no_place(embedded: Tokenizer) -> None:
    talk = [SYSTEM, {"role": "user", "content": "a<|im_end|>b. And <|im_start|> then?"}]
    found = beginnings(embedded, talk, breakpoints=[Breakpoint(1, len("a<|im_end|>b."))])
    assert found[-1].endswith("<|im_start|>user\na<|im_end|>b.")


@pytest.mark.parametrize("words", [["x"], ["hello", " world"], ["\n", "\u2615\u2615", "<|im_end|>"]])
def test_every_checkpoint_is_a_number_of_tokens_of_the_prompt(words: list[str]) -> None:
    tokenizer = tiny_tokenizer(600)
    talk = [{"role": role, "content": word * 3} for word in words for role in ("user", "assistant")]
    prompt = tokenizer.encode_chat_prompt(talk)
    assert prompt.resume_points == sorted(prompt.resume_points)
    assert all(0 < count < len(prompt.token_ids) for count in prompt.resume_points)


def test_the_number_of_renderings_is_bounded_and_of_long_texts_there_are_fewer() -> None:
    calls: list[int] = []

    def render(messages: list[dict[str, Any]]) -> str:
        calls.append(len(messages))
        return "".join(message["content"] for message in messages)

    talk = [{"role": "user", "content": "x"} for _ in range(100)]
    marks = [Breakpoint(i, 1) for i in range(100)]
    assert places("x" * 100, talk, marks, render) == ([*range(97, 100)], [97, 98, 99, 100])
    assert len(calls) == MAX_BREAKPOINTS + 1 + MAX_LAST_MESSAGES
    calls.clear()
    assert places("x" * (4 << 20), talk, marks, render) == ([97], [97, 0, 0, 0])
    assert len(calls) == 1


def test_what_a_template_refuses_is_no_place() -> None:
    def render(messages: list[dict[str, Any]]) -> str:
        raise InvalidRequest("roles must alternate")

    assert places("abc", TALK, [], render) == ([], [])
    assert places("abc", TALK, [Breakpoint(0, 1)], render, marks_alone=True) == ([], [0])


IMAGE: dict[str, str] = {"type": "image"}
WITH_IMAGES = [
    {"role": "user", "content": [{"type": "text", "text": "<|a|>One"}, IMAGE, {"type": "text", "text": "two <|b|>"}]},
    {"role": "assistant", "content": "Three"},
    {"role": "user", "content": [IMAGE, IMAGE]},
]
IN_PARTS = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '[image]' }}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("point", "beginning"),
    [
        (Breakpoint(0, 8), "<|im_start|><|a|>One"),
        (Breakpoint(0, 9), "<|im_start|><|a|>One[image]"),
        (Breakpoint(0, 12), "<|im_start|><|a|>One[image]two"),
        (Breakpoint(0, 18), "<|im_start|><|a|>One[image]two <|b|><|im_end|>"),
        (
            Breakpoint(2, 1),
            "<|im_start|><|a|>One[image]two <|b|><|im_end|><|im_start|>Three<|im_end|><|im_start|>[image]",
        ),
    ],
)
def test_breakpoint_in_a_message_with_images_counts_each_as_a_character(point: Breakpoint, beginning: str) -> None:
    tokenizer = tiny_tokenizer(template=IN_PARTS)
    assert beginning in beginnings(tokenizer, WITH_IMAGES, breakpoints=[point])


def test_breakpoint_behind_a_guarded_spelling_is_where_its_part_ends() -> None:
    """Marks that keep spellings from being control tokens are no characters."""
    tokenizer = tiny_tokenizer(template=IN_PARTS)
    talk = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>One"}, IMAGE]}, WITH_IMAGES[1]]
    for num_chars, beginning in ((13, "<|im_end|>One"), (14, "<|im_end|>One[image]<|im_end|>")):
        found = beginnings(tokenizer, talk, breakpoints=[Breakpoint(0, num_chars)])
        assert f"<|im_start|>{beginning}" in found
