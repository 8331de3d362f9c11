"""The tokens that end an answer, by what the tokenizer's files and the chat template say.

config.json and generation_config.json of a chat model may still name the end of its base model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.text.tokenizer import Tokenizer

_ASKED: Final = {"role": "user", "content": "Probe."}
_SAID: Final = "Probed."
_ANSWERED: Final = {"role": "assistant", "content": _SAID}
_THOUGHT: Final = {"reasoning_content": "Hm.", "thinking": "Hm."}
_TOOL_NAMES: Final = ("probe_tool", "other_tool")
_TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": {"type": "object"}}}
    for name in _TOOL_NAMES
]
_OF_CHANNELS: Final = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
_BETWEEN_CHANNELS: Final = "<|end|>"  # it ends a part of an answer in a vocabulary with the tokens above


def end_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the end tokens besides those of config.json and generation_config.json, each with the reason."""
    found: dict[int, str] = {}
    if tokenizer.eos_token_id is not None:
        found[tokenizer.eos_token_id] = "the tokenizer's eos_token"
    turn = _end_of_turn(tokenizer)
    if turn is not None:
        found.setdefault(turn, "the chat template writes it behind an assistant's message")
    return found


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the token behind an assistant's message: its end, or, in a template without one, the beginning of the
    user's next turn. None for no token, or for one that may also occur within an answer."""
    for history in ([_ASKED, _ANSWERED], [_ASKED, _ANSWERED, _ASKED]):
        _, said, ending = _rendered(tokenizer, history).partition(_SAID)
        spelled = tokenizer.control_at(ending.lstrip()) if said else ""
        if spelled:
            return None if _stands_within(spelled, tokenizer) else tokenizer.added_id(spelled)
    return None


def _stands_within(spelled: str, tokenizer: Tokenizer) -> bool:
    """Return whether an answer has this token before its last words or its last call: behind thoughts, as those of
    several channels do, or between messages of which each has one call."""
    if spelled == _BETWEEN_CHANNELS and any(
        all(tokenizer.added_id(word) is not None for word in words) for words in _OF_CHANNELS
    ):
        return True
    begun = {
        with_tools: _rendered(tokenizer, [_ASKED], add_generation_prompt=True, **_tools(with_tools)).count(spelled)
        for with_tools in (False, True)
    }
    for answer in _answers():
        with_tools = "tool_calls" in answer
        text = _rendered(tokenizer, [_ASKED, answer], **_tools(with_tools))
        last = max(text.rfind(word) for word in (_SAID, *_TOOL_NAMES))
        if text.count(spelled, 0, max(last, 0)) > begun[with_tools]:
            return True
    return False


def _answers() -> Iterator[dict[str, Any]]:
    """Yield answers of words, thoughts and calls, in each form that templates take."""
    yield {**_ANSWERED, **_THOUGHT}
    for arguments, num_calls, content in product(({"key": 1}, '{"key": 1}'), (2, 1), (_SAID, None)):
        calls = [
            {"id": f"probed{number:03}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name in enumerate(_TOOL_NAMES[:num_calls])
        ]
        yield {"role": "assistant", "content": content, **_THOUGHT, "tool_calls": calls}


def _tools(with_tools: bool) -> dict[str, Any]:
    return {"tools": _TOOLS} if with_tools else {}


def _rendered(
    tokenizer: Tokenizer, history: list[dict[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
) -> str:
    """Return the text of a conversation; "" if there is no template or it refuses this one."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return tokenizer.render(history, add_generation_prompt=add_generation_prompt, **variables)
    except InvalidRequest:
        return ""
