"""NGRAM: the tokens that followed the same tokens before are the draft. No model, no torch.

The end of a request is looked up in its own tokens, and in recent outputs of its namespace; the longer match wins, and
is trusted for as many tokens as it has itself. A match is kept while the tokens that it predicted are the ones that
came; then the latest place of the last two tokens is taken or, in the request's own tokens, of the last one. On outputs
of the embedded model and on this project's own edits that is as good as the longest match of all, which would take an
automaton (`benchmarks/ngram.py`).

The work of a step is bounded: tokens are indexed only when a match has ended, and a long prompt in slices, over several
steps. Tokens that are not indexed yet are not found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.request import Request
from forebay.speculation.last_places import LastPlaces

LONGEST_OUTPUT: Final = 1 << 14  # tokens: of a longer output only its end is kept, so that entering it takes 0.5 ms
_BITS: Final = 32  # of a place in an output

# The effort of a step, in tokens that are indexed one by one (0.4 us each).
_EFFORT: Final = 1024
_EFFORT_PER_REQUEST: Final = 2
_FEW: Final = 32  # tokens: more are indexed by array operations, which cost 24 of these and one more for 16 tokens
_BULK: Final = 24
_BULK_TOKENS: Final = 16

# Slots per token: 24 to 48 bytes for a request's token, 32 for one of a kept output; an old entry is still found in
# 4 of 5 cases, and a match that starts one token later has lost one draft token.
_OWN_SLOTS: Final = 6
_KEPT_SLOTS: Final = 4
_LEAST_TOKENS: Final = 100


@dataclass(slots=True)
class Match:
    """The last `length` tokens of a request are equal to those of `text` in front of `place`; 0 if there is no such
    place."""

    text: array[int] = field(default_factory=lambda: array("i"))
    place: int = 0
    length: int = 0

    def follows(self, tokens: array[int], start: int, depth: int) -> bool:
        """Return whether the match predicted `tokens[start:]`; it is then moved behind them, with at most `depth` as
        length."""
        text, place, num_new = self.text, self.place, len(tokens) - start
        if num_new == 1:
            if place >= len(text) or text[place] != tokens[start]:
                return False
        elif text[place : place + num_new] != tokens[start:]:
            return False
        self.place = place + num_new
        self.length = min(depth, self.length + num_new)
        return True

    def begin(self, text: array[int], place: int, tokens: array[int], depth: int) -> None:
        """Become the match of those tokens before `place` that are also at the end of the request's."""
        most = min(depth, place, len(tokens))
        length = 0
        while length < most and text[place - 1 - length] == tokens[-1 - length]:
            length += 1
        self.text, self.place, self.length = text, place, length


@dataclass(slots=True)
class Reader:
    """The index of one request: its tokens up to `num_read` have been compared with its matches, those up to
    `num_indexed` are in `places`. `own` is the match in its own tokens, `recent` the one in an output of its namespace.
    """

    namespace: str
    salt: int
    places: LastPlaces
    num_read: int = 0
    num_indexed: int = 0
    own: Match = field(default_factory=Match)
    recent: Match = field(default_factory=Match)


class Ngram:
    """The proposer, for one scheduler.

    Of each request that was asked about it keeps 24 to 48 bytes a token until the request has `ended`. The outputs of
    ended requests stay, `ngram_capacity` tokens of all namespaces together; the oldest output goes first.
    """

    def __init__(self, options: SpeculationOptions) -> None:
        self._depth = options.ngram_max_trie_depth
        self._capacity = options.ngram_capacity
        self._readers: dict[int, Reader] = {}  # by the request's id
        self._outputs: dict[int, tuple[str, array[int]]] = {}  # by number, oldest first, with the namespace
        self._kept_places = LastPlaces(_KEPT_SLOTS * options.ngram_capacity, np.int64)  # number << 32 | place
        self._num_ended = 0
        self._effort = 0
        self.num_kept_tokens = 0

    def begin_step(self, num_requests: int) -> None:
        """Allow the effort of one more step."""
        self._effort = _EFFORT + _EFFORT_PER_REQUEST * num_requests

    def propose(self, req: Request, most: int) -> Sequence[int]:
        """Return a draft of what follows `req.tokens`: at most `most` tokens, and often none."""
        reader = self._readers.get(req.id)
        if reader is None:
            reader = self._readers[req.id] = Reader(
                req.cache_namespace, _salt(req.cache_namespace), _places_for(len(req.tokens))
            )
        tokens, own, recent = req.tokens, reader.own, reader.recent
        if reader.num_read < len(tokens):
            self._follow_own(reader, tokens)
            self._follow_recent(reader, tokens)
            reader.num_read = len(tokens)
        if recent.length > own.length and recent.place < len(recent.text):
            return recent.text[recent.place : recent.place + min(recent.length, most)]
        if not own.length:
            return ()
        count = min(own.length, most)
        followed = tokens[own.place : own.place + count]
        if len(followed) < count:  # it reaches up to the end: what repeats goes on repeating
            followed = (followed * count)[:count]
        return followed

    def ended(self, req: Request) -> None:
        """Forget the request, and keep its output as one of those that drafts of its namespace come from."""
        self._readers.pop(req.id, None)
        output = req.tokens[req.num_prompt :][-min(self._capacity, LONGEST_OUTPUT) :]
        if len(output) < 3:  # a pair, and what followed
            return
        self._num_ended += 1
        namespace = req.cache_namespace
        self._outputs[self._num_ended] = (namespace, output)
        self.num_kept_tokens += len(output)
        self._kept_places.add_pairs(output[:-1], (self._num_ended << _BITS) + 2, _salt(namespace))
        while self.num_kept_tokens > self._capacity:
            _, oldest = self._outputs.pop(next(iter(self._outputs)))
            self.num_kept_tokens -= len(oldest)

    def _follow_own(self, reader: Reader, tokens: array[int]) -> None:
        own, end = reader.own, len(tokens)
        if own.length and own.follows(tokens, reader.num_read, self._depth):
            return
        own.length = 0
        pair, single = self._places_of_last(reader, tokens, end)
        if pair:
            own.begin(tokens, pair, tokens, self._depth)
        if own.length < 2:
            own.begin(tokens, single, tokens, self._depth)

    def _places_of_last(self, reader: Reader, tokens: array[int], end: int) -> tuple[int, int]:
        """Return the earlier place of the last two tokens, and that of the last one; the tokens before it are indexed
        first."""
        if reader.num_indexed == end - 2 > 0 and self._effort and end * _OWN_SLOTS <= reader.places.num_slots:
            self._effort -= 1
            reader.num_indexed = end - 1
            return reader.places.add_and_find(tokens[-3], tokens[-2], tokens[-1], end - 1)
        self._index(reader, tokens, end - 1)
        pair = reader.places.of_pair(tokens[-2], tokens[-1]) if end > 1 else 0
        return pair, reader.places.of_single(tokens[-1])

    def _follow_recent(self, reader: Reader, tokens: array[int]) -> None:
        recent, end = reader.recent, len(tokens)
        if recent.length and recent.follows(tokens, reader.num_read, self._depth):
            return
        recent.length = 0
        if end < 2 or not self._outputs:
            return
        found = self._kept_places.of_pair(tokens[-2], tokens[-1], reader.salt)
        kept = self._outputs.get(found >> _BITS)
        if kept and kept[0] == reader.namespace:
            recent.begin(kept[1], found & ((1 << _BITS) - 1), tokens, self._depth)
            if recent.length < 2:  # another pair has the slot
                recent.length = 0

    def _index(self, reader: Reader, tokens: array[int], end: int) -> None:
        """Enter the tokens before `end` into the reader's places, as far as the step's effort allows."""
        if end * _OWN_SLOTS > reader.places.num_slots:
            reader.places, reader.num_indexed = _places_for(len(tokens)), 0
        first = reader.num_indexed
        count = end - first
        if count <= _FEW:
            if count > self._effort:
                return
            self._effort -= count
            reader.places.add(tokens, first, end)
        else:
            count = min(count, (self._effort - _BULK) * _BULK_TOKENS)
            if count <= 0:
                return
            self._effort -= _BULK + count // _BULK_TOKENS
            reader.places.add_many(tokens, first, first + count)
        reader.num_indexed = first + count


def _places_for(num_tokens: int) -> LastPlaces:
    """Return an empty table: large enough for a request of `num_tokens`, and for many of the lengths that follow."""
    return LastPlaces(_OWN_SLOTS * max(num_tokens, _LEAST_TOKENS), np.int32)


def _salt(namespace: str) -> int:
    return xxhash.xxh3_64_intdigest(namespace.encode()) >> 1
