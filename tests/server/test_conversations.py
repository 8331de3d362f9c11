"""Histories of dialects as the messages that a chat template renders."""

from __future__ import annotations

from typing import Any

from forebay.server.api.openai.responses_items import ReasoningItem, messages_of
from forebay.text.answers.for_template import one_call_each


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "function": {"name": "f"}}


def answer(number: int, text: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def test_one_call_each_splits_a_message_of_several_calls_with_their_results_behind_them() -> None:
    asked, after = {"role": "user", "content": "?"}, {"role": "user", "content": "!"}
    both = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call(1), call(2)]}
    first = {**both, "tool_calls": [call(1)]}
    second = {"role": "assistant", "content": None, "tool_calls": [call(2)]}
    talk = [asked, both, answer(2, "b"), answer(1, "a"), answer(9, "of none"), after]
    assert one_call_each(talk) == [*(asked, first, answer(1, "a"), second, answer(2, "b"), answer(9, "of none"), after)]
    single = [asked, first, answer(1), after, both]
    assert one_call_each(single) == [*single[:-1], first, second]


def test_reasoning_item_adds_its_text_to_the_message_of_the_model_and_an_empty_one_none() -> None:
    def thought(*texts: str) -> ReasoningItem:
        content = [{"type": "reasoning_text", "text": text} for text in texts]
        return ReasoningItem.parse({"type": "reasoning", "summary": [], "content": content or None})

    assert messages_of([thought()], None) == []
    (message,) = messages_of([thought("a"), thought(), thought("b")], None)
    assert (message["role"], message["reasoning_content"]) == ("assistant", "ab")
