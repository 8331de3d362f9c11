"""Answers of a server as they are compared: texts, calls and, if the server returns log-probabilities, tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from forebay.base.errors import EngineError

_END: Final = "the end"
_CONTEXT_CHARS: Final = 24  # shown of a text from the place of a difference on


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token as the server writes it, its log-probability, and those of the likeliest alternatives."""

    text: str
    logprob: float
    tops: Mapping[str, float]


@dataclass(slots=True)
class Reply:
    """One answer. `calls` are names and arguments of tool calls. `tokens` is empty if the server returns none.
    `cached_tokens` is None if the server does not report them."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_events: int = 0

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> Reply:
        """Parse an answer that is not streamed. Raises EngineError for a body without a choice."""
        reply = cls()
        choice = _choice(body)
        if choice is None:
            raise EngineError(f"an answer without `choices`: {str(body)[:200]!a}")
        reply._add(choice.get("message") or choice, choice)
        reply._count(body)
        return reply

    def add_event(self, event: Mapping[str, Any]) -> bool:
        """Append one event of a stream; return whether it had generated text or a call."""
        self._count(event)
        choice = _choice(event)
        if choice is None:
            return False
        return self._add(choice.get("delta") or choice, choice)

    def _add(self, message: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
        text = message.get("content") or message.get("text") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = message.get("tool_calls") or []
        self.text += text
        self.reasoning += reasoning
        for place, call in enumerate(calls):
            self._add_call(int(call.get("index", place)), call.get("function") or {})
        self.finish = choice.get("finish_reason") or self.finish
        self.tokens += _tokens(choice.get("logprobs") or {})
        generated = bool(text or reasoning or calls)
        self.num_events += generated
        return generated

    def _add_call(self, index: int, function: Mapping[str, Any]) -> None:
        while len(self.calls) <= index:
            self.calls.append(["", ""])
        call = self.calls[index]
        call[0] += function.get("name") or ""
        call[1] += function.get("arguments") or ""

    def _count(self, body: Mapping[str, Any]) -> None:
        usage = body.get("usage")
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            self.cached_tokens = details["cached_tokens"]

    @property
    def parts(self) -> dict[str, str]:
        """Return what is compared if the tokens are equal or not known."""
        calls = "\n".join(f"{name}({arguments})" for name, arguments in self.calls)
        return {"reasoning": self.reasoning, "text": self.text, "calls": calls, "finish_reason": self.finish}

    @property
    def page_text(self) -> str:
        """Return all parts for a page. The finish_reason is marked as no part of the text."""
        *texts, finish = self.parts.values()
        return "\n".join(filter(None, [*texts, finish and f"[finish_reason: {finish}]"]))


def _choice(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first choice of an answer or an event, None if it has none. Raises ValueError for another form."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    if not isinstance(choices[0], dict):
        raise ValueError(f"a choice that is no object: {str(choices[0])[:80]!a}")
    return choices[0]


def _tokens(logprobs: Mapping[str, Any]) -> Iterable[Token]:
    if isinstance(content := logprobs.get("content"), list):
        return [_chat_token(entry) for entry in content]
    texts, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or ()
    return [
        Token(str(text), float(value or 0.0), top if isinstance(top, dict) else {})
        for text, value, top in zip_longest(texts, values, tops)
    ]


def _chat_token(entry: Mapping[str, Any]) -> Token:
    tops = {str(top.get("token")): float(top.get("logprob") or 0.0) for top in entry.get("top_logprobs") or ()}
    return Token(str(entry.get("token")), float(entry.get("logprob") or 0.0), tops)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which an answer differs from the one that was given alone.

    `unit` is "token", or the part of the answer whose characters are counted if tokens are not known. `gap` is the
    number of nats by which the expected token was likelier alone, None if not known. `texts` are both whole answers.
    """

    question: int
    way: str
    num_tokens: int
    unit: str
    place: int
    expected: str
    found: str
    gap: float | None
    texts: tuple[str, str]


def first_difference(expected: Reply, found: Reply) -> tuple[str, int, str, str, float | None] | None:
    """Return unit, place, both pieces and the gap of the first difference, or None for equal answers.

    Answers are equal if their texts, calls and finish reasons are. Tokens only locate a difference, because servers
    report them differently in a stream."""
    unequal = [name for name, text in expected.parts.items() if found.parts[name] != text]
    if not unequal:
        return None
    for place, (wanted, got) in enumerate(zip_longest(expected.tokens, found.tokens) if found.tokens else ()):
        if wanted is None or got is None or wanted.text != got.text:
            return "token", place, *_pieces(wanted, got), _gap(wanted, got)
    name = unequal[0]
    texts = expected.parts[name], found.parts[name]
    place = first_unequal_word(*texts)
    wanted_piece, found_piece = (text[place : place + _CONTEXT_CHARS] or _END for text in texts)
    return name, place, wanted_piece, found_piece, None


def _pieces(*tokens: Token | None) -> tuple[str, str]:
    wanted, got = (_END if token is None else token.text for token in tokens)
    return wanted, got


def _gap(wanted: Token | None, got: Token | None) -> float | None:
    if wanted is None or got is None or got.text not in wanted.tops:
        return None
    return wanted.logprob - wanted.tops[got.text]


def first_unequal_word(one: str, other: str) -> int:
    """Return the number of characters before the first word that is not the same in both texts."""
    pairs = enumerate(zip(one, other, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return max(one.rfind(space, 0, place) for space in " \n") + 1


def largest_logprob_gap(expected: Reply, found: Reply) -> float:
    """Return the largest difference between log-probabilities of equal tokens up to the first that differs."""
    largest = 0.0
    for wanted, got in zip(expected.tokens, found.tokens, strict=False):
        if wanted.text != got.text:
            break
        largest = max(largest, abs(wanted.logprob - got.logprob))
    return largest
