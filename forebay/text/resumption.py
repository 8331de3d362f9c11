"""Positions in a conversation at which later requests are likely to diverge: states and windows are worth keeping
there.

A position is found by rendering a variation of the conversation: the text that both have in common contains nothing of
the varied part. These are hints: a wrong one costs an unused state, never a token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from forebay.base.errors import InvalidRequest

MAX_LAST_MESSAGES: Final = 3  # ends of the last messages, from which a user who edits or tries again goes on
MAX_BREAKPOINTS: Final = 4  # of one request, as Anthropic's API allows
IMAGE_CHARS: Final = 1  # that an image counts among the characters of a message
MAX_RENDERED_CHARS: Final = 4 << 20  # by all variations of one conversation together

_ELSE: Final = "\U000ffffd"

Message = dict[str, Any]
Content = str | list[dict[str, str]]
Render = Callable[[list[Message]], str]


class Breakpoint(NamedTuple):
    """A position that the client names for later requests: behind `num_chars` characters of a message's content."""

    message: int
    num_chars: int


class ChatPrompt(NamedTuple):
    """The tokens of a conversation, and the numbers of them behind which later requests are likely to continue,
    ascending. `marks` are those at the client's breakpoints, in their order: 0 for one that was not found."""

    token_ids: list[int]
    resume_points: list[int]
    marks: list[int]


class Places(NamedTuple):
    """Numbers of characters of a conversation: `points` ascending, each once, and `marks` by breakpoint, 0 for one that
    was not found."""

    points: list[int]
    marks: list[int]


def places(
    text: str,
    messages: Sequence[Message],
    breakpoints: Sequence[Breakpoint],
    render: Render,
    *,
    marks_alone: bool = False,
) -> Places:
    """Return the places in `text`, the rendering of all of `messages`, behind which later requests may continue.

    `render` renders without a generation prompt. A variation that the template refuses gives no position. The number of
    renderings and their total size are bounded, so a very long conversation has only the first of these positions: the
    breakpoints, the end of the text before the user's first message (tools, system prompt), the last messages. With
    `marks_alone` only the breakpoints are looked for.
    """
    found = list[int]()
    affordable = MAX_RENDERED_CHARS // max(1, len(text))
    breakpoints = breakpoints[-MAX_BREAKPOINTS:]
    variations = chain(_at(messages, breakpoints), () if marks_alone else _likely(messages))
    for variation in islice(variations, affordable):
        try:
            found.append(_common_chars(text, render(variation)))
        except InvalidRequest:
            found.append(0)
    marks = found[: len(breakpoints)]
    return Places(sorted({*found} - {0, len(text)}), marks + [0] * (len(breakpoints) - len(marks)))


def _at(messages: Sequence[Message], breakpoints: Sequence[Breakpoint]) -> Iterator[list[Message]]:
    """Yield a variation for each breakpoint."""
    for message, num_chars in breakpoints:
        content = messages[message]["content"] or ""
        if num_chars >= num_chars_of(content):
            yield list(messages[: message + 1])
        else:
            yield [*messages[:message], _otherwise(messages[message], _beginning(content, num_chars))]


def _likely(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield variations at which most clients continue."""
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is not None:
        yield [*messages[:first], _otherwise(messages[first], "")]
    for end in range(len(messages) - 1, max(0, len(messages) - 1 - MAX_LAST_MESSAGES), -1):
        yield list(messages[:end])


def _common_chars(text: str, other: str) -> int:
    """Return how many characters both begin with, by halving: a loop over characters would take longer than the
    rendering."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def num_chars_of(content: Content) -> int:
    """Return the length of a message's content; an image in it has `IMAGE_CHARS`."""
    if isinstance(content, str):
        return len(content)
    return sum(IMAGE_CHARS if part["type"] == "image" else len(part["text"]) for part in content)


def _beginning(content: Content, num_chars: int) -> Content:
    if isinstance(content, str):
        return content[:num_chars]
    parts: list[dict[str, str]] = []
    for part in content:
        if num_chars <= 0:
            break
        parts.append(part if part["type"] == "image" else {**part, "text": part["text"][:num_chars]})
        num_chars -= num_chars_of([part])
    return parts


def _otherwise(message: Message, beginning: Content) -> Message:
    """Return the message with another continuation, which no text of people has."""
    if isinstance(beginning, str):
        return {**message, "content": f"{beginning}{_ELSE}"}
    return {**message, "content": [*beginning, {"type": "text", "text": _ELSE}]}


def token_counts(ends: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return how many tokens lie wholly before each of `positions`; `ends` are the ends of the tokens, in
    characters."""
    return [count for position in positions if (count := bisect_right(ends, position))]
