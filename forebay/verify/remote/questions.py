"""Requests that a server is asked to answer again and again: prompts of many lengths, each with a way of sampling."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.base.errors import ConfigError
from forebay.verify.texts import TEXTS

CHARS_PER_TOKEN: Final = 3  # of these texts, about; a server reports the exact number
Fields = Mapping[str, Any]
_TEMPLATE_TOKENS: Final = 200  # of a chat template with tools

GREEDY: Final[Fields] = {"temperature": 0.0}
SEEDED: Final[Fields] = {"temperature": 0.8, "top_p": 0.95}  # and the number of the question as the seed
SCHEMA: Final[Fields] = {
    **GREEDY,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "summary",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string", "maxLength": 60}, "words": {"type": "integer"}},
                "required": ["title", "words"],
                "additionalProperties": False,
            },
        },
    },
}
TOOLS: Final[Fields] = {
    **GREEDY,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": "Find a word in the dictionary.",
                "parameters": {
                    "type": "object",
                    "properties": {"word": {"type": "string"}, "language": {"type": "string"}},
                    "required": ["word"],
                },
            },
        }
    ],
}
_WAYS: Final[Mapping[str, Fields]] = {
    "greedy": GREEDY,
    "sampled by seed": SEEDED,
    "JSON schema": SCHEMA,
    "tools": TOOLS,
}
# Tokens of each prompt, and how its answer is chosen. Short prompts come first: a slow server answers some of them.
_PLAN: Final = (
    (20, "greedy"),
    (24, "tools"),
    (40, "JSON schema"),
    (60, "sampled by seed"),
    (130, "greedy"),
    (260, "sampled by seed"),
    (300, "tools"),
    (520, "greedy"),
    (1030, "greedy"),
    (2050, "JSON schema"),
    (4100, "sampled by seed"),
    (8000, "greedy"),
)


class Question(NamedTuple):
    """`fields` are those of the request's body without model, `max_tokens` and stream. `way` names how tokens are
    chosen. `num_tokens` is an estimate of the prompt's length."""

    number: int
    fields: Fields
    way: str
    num_tokens: int


def make_questions(seed: int, context_length: int | None, max_tokens: int, *, chats: bool = True) -> list[Question]:
    """Return the built-in questions that fit into the context, the same ones for the same seed, short ones first.
    Without `chats` they are texts to continue, and none has tools."""
    rng = random.Random(seed)
    room = (context_length or 1 << 30) - max_tokens - _TEMPLATE_TOKENS
    plan = [(num_tokens, way) for num_tokens, way in _PLAN if num_tokens <= room] or _PLAN[:1]
    return [_question(number, rng, num_tokens, way, chats) for number, (num_tokens, way) in enumerate(plan)]


def _question(number: int, rng: random.Random, num_tokens: int, way: str, chats: bool) -> Question:
    prompt = make_prompt(rng, num_tokens)
    if not chats and way not in ("greedy", "sampled by seed"):
        way = "greedy"
    seed = {"seed": number + 1} if way == "sampled by seed" else {}
    return Question(number, {**(chat(prompt) if chats else {"prompt": prompt}), **_WAYS[way], **seed}, way, num_tokens)


def make_prompt(rng: random.Random, num_tokens: int) -> str:
    """Return a text of about `num_tokens` tokens. It begins with random digits, so that no earlier run cached it."""
    head = f"{rng.getrandbits(48):012x}: continue this text.\n\n"
    return head + _text(rng, num_tokens * CHARS_PER_TOKEN - len(head))


def _text(rng: random.Random, num_chars: int) -> str:
    text = ""
    while len(text) < num_chars:
        text += rng.choice(TEXTS)
    return text[: max(num_chars, 20)]


def chat(prompt: str) -> Fields:
    """Return the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": prompt}]}


def sibling(question: Question, rng: random.Random) -> Fields:
    """Return a request whose prompt equals the question's in its first three quarters and continues differently."""
    fields = dict(question.fields)
    if "prompt" in fields:
        fields["prompt"] = _diverging(fields["prompt"], rng)
        return fields
    *before, last = fields["messages"]
    fields["messages"] = [*before, {**last, "content": _diverging(str(last["content"]), rng)}]
    return fields


def _diverging(text: str, rng: random.Random) -> str:
    shared = text[: len(text) * 3 // 4]
    return shared + _text(rng, len(text) - len(shared))


def filler(rng: random.Random, num_tokens: int, like: Question) -> Fields:
    """Return a request that is load only: a new prompt, sampled without a seed, a chat if `like` is one."""
    prompt = make_prompt(rng, num_tokens)
    return {**({"prompt": prompt} if "prompt" in like.fields else chat(prompt)), "temperature": 1.0}


def read_questions(path: Path) -> list[Question]:
    """Read one question from each line: a JSON string is a user's message, an object is the body of a request with
    `messages` or `prompt`. The answer is greedy unless the object sets `temperature`; then it has a seed.

    Raises ConfigError with the line if the file has no such lines.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    found = [_read(f"--prompts {path}, line {number}", line, i) for i, (number, line) in enumerate(numbered)]
    if not found:
        raise ConfigError(f"--prompts {path} has no lines: write one JSON string or object a line")
    return sorted(found, key=lambda question: question.num_tokens)


def _read(where: str, line: str, number: int) -> Question:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is no JSON: write a string, or an object with `messages` or `prompt`") from None
    body: dict[str, Any] = dict(chat(value)) if isinstance(value, str) else value
    if not isinstance(body, dict) or not (_is_chat(body.get("messages")) or isinstance(body.get("prompt"), str)):
        raise ConfigError(f"{where} must be a string, or an object with a list of `messages` or a text as `prompt`")
    for name in ("model", "stream", "stream_options", "n"):
        body.pop(name, None)  # decided by the comparison
    sampled = bool(body.setdefault("temperature", 0.0))
    if sampled:
        body.setdefault("seed", number + 1)
    return Question(number, body, "sampled by seed" if sampled else "greedy", len(line) // CHARS_PER_TOKEN)


def _is_chat(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(isinstance(one, dict) for one in messages)
