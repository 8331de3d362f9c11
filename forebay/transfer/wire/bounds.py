"""Bounds of a peer's frames that follow from this engine's own caches and vocabulary; `frames.py` has all others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Tail
from forebay.requests.updates import CacheReport, Failure
from forebay.transfer.wire import frames
from forebay.transfer.wire.framing import WireError
from forebay.transfer.wire.pages import KindShape

MAX_CODE_CHARS: Final = 64
MAX_MESSAGE_CHARS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """`check` is called once for each frame of a session, before anything in it is used (C33)."""

    shapes: Mapping[str, KindShape]
    vocab_size: int

    def check(self, frame: msgspec.Struct) -> None:
        """Raises WireError that names the first field out of bounds."""
        match frame:
            case frames.Offering():
                self._check_offering(frame)
            case frames.Declined(failure=failure) | frames.Refused(failure) | frames.Withdrawn(_, failure):
                _check_failure(failure)
            case frames.Completed(_, tail):
                self._check_tail(tail)
            case _:
                pass

    def _check_offering(self, frame: frames.Offering) -> None:
        num_tokens = frame.num_tokens
        _check("start", frame.start, 0, num_tokens - 1)
        for kind, places in frame.places.items():
            # Of a kind that is not kept here the offer alone is refused (`extents`).
            per_slot = kind in self.shapes and not self.shapes[kind].by_token
            most, last = (1, 0) if per_slot else (num_tokens, num_tokens)
            _check(f"{kind} places", len(places.ids) // frames.ID_BYTES, 0, most)
            _check(f"{kind} start", places.start, 0, last)

    def _check_tail(self, tail: Tail) -> None:
        num_tokens = tail.num_tokens
        _check("num_tokens", num_tokens, 1, frames.MAX_POSITION)
        _check("token_id", tail.token_id, 0, self.vocab_size - 1)
        self._check_report(tail.cache, num_tokens)
        listed = tail.prompt_logprobs or []
        _check("prompt_logprobs", len(listed), 0, num_tokens)
        for entry in (tail.logprob, *listed):
            if entry is not None:
                self._check_logprob(entry)

    def _check_report(self, report: CacheReport, num_tokens: int) -> None:
        _check("resumable", len(report.resumable), 0, frames.MAX_KINDS)
        for position in (report.cached_tokens, report.kv_tokens, *report.resumable.values()):
            _check("cached position", position, 0, num_tokens)
        _check("differs_at", report.differs_at, -1, num_tokens)
        for token_id in (report.token_here, report.token_there):
            _check("token that differs", token_id, -1, self.vocab_size - 1)

    def _check_logprob(self, entry: TokenLogprob) -> None:
        _check("token_id", entry.token_id, 0, self.vocab_size - 1)
        _check("rank", entry.rank, 0, self.vocab_size)
        _check("top_ids", len(entry.top_ids), len(entry.top_logprobs), len(entry.top_logprobs))
        _check("top_ids", len(entry.top_ids), 0, self.vocab_size)
        for token_id in entry.top_ids:
            _check("top token_id", token_id, 0, self.vocab_size - 1)
        if any(math.isnan(value) or value == math.inf for value in (entry.logprob, *entry.top_logprobs)):
            raise WireError("a log-probability is out of bounds: it is not a number or positive infinity")


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise WireError(f"{name} of a peer's frame is out of bounds: {value}; {low} to {high} are possible here")


def _check_failure(failure: Failure) -> None:
    for name, text in (("kind", failure.kind), ("code", failure.code)):
        _check(f"characters in {name}", len(text), 1, MAX_CODE_CHARS)
        if not text.replace("_", "").isalnum() or not text.isascii():
            raise WireError(f"{name} of a peer's failure is out of bounds: letters, digits and _ are possible")
    _check("characters in message", len(failure.message), 0, MAX_MESSAGE_CHARS)
