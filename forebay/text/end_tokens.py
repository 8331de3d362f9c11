"""The tokens that end an answer, by what the tokenizer's files and the chat template say.

config.json and generation_config.json of a chat model may still name the end of its base model alone.
"""

from __future__ import annotations

from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.text.tokenizer import Tokenizer

_ASKED: Final = {"role": "user", "content": "Probe."}
_SAID: Final = "Probed."
_ANSWERED: Final = {"role": "assistant", "content": _SAID}
_THOUGHTFUL: Final = {**_ANSWERED, "reasoning_content": "Hm.", "thinking": "Hm."}
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
    user's next turn. None for no token, or for one that also stands within an answer."""
    for history in ([_ASKED, _ANSWERED], [_ASKED, _ANSWERED, _ASKED]):
        _, said, rest = _rendered(tokenizer, history).partition(_SAID)
        spelled = tokenizer.control_at(rest.lstrip()) if said else ""
        if spelled:
            return None if _stands_within(spelled, tokenizer) else tokenizer.added_id(spelled)
    return None


def _stands_within(spelled: str, tokenizer: Tokenizer) -> bool:
    """Return whether an answer with thoughts has this token before its last words, as those of several channels do."""
    if spelled == _BETWEEN_CHANNELS and any(
        all(tokenizer.added_id(word) is not None for word in words) for words in _OF_CHANNELS
    ):
        return True
    opened = _rendered(tokenizer, [_ASKED], add_generation_prompt=True)
    thought = _rendered(tokenizer, [_ASKED, _THOUGHTFUL]).partition(_SAID)[0]
    return thought.count(spelled) > opened.count(spelled)


def _rendered(tokenizer: Tokenizer, history: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    """Return the text of a conversation; "" if there is no template or it refuses this one."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return tokenizer.render(history, add_generation_prompt=add_generation_prompt)
    except InvalidRequest:
        return ""
