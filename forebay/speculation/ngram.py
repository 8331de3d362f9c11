"""NGRAM: what followed the same tokens before is the guess of what follows now. No model, no torch.

A request's end is looked for in its own tokens, and in recent outputs of its namespace; the longer match wins, and is
trusted for as many tokens as it has itself. A match goes on for as long as what it foretold is what came; then the
latest place is taken where the last two tokens stood, or of its own tokens, the last one. On streams of the embedded
model and on this project's own edits that is as good as the longest match of all, which would take an automaton
(`benchmarks/ngram.py`), and it costs two look-ups a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.request import Request

MANY: Final = 64  # new tokens: from here on they are read all at once, and a match begins anew at their end
_BITS: Final = 32  # of a token id, and of a place in an output

Places = dict[int, int]  # behind the latest tokens that are the key


@dataclass(slots=True)
class Match:
    """The last `length` tokens of a request stood in `text` before, in front of `place`; 0 where they did not."""

    text: array[int] = field(default_factory=lambda: array("i"))
    place: int = 0
    length: int = 0

    def goes_on(self, token: int, most: int) -> bool:
        """Whether the request's next token is the one that the match foretold. It is never longer than `most`."""
        if not self.length or self.place >= len(self.text) or self.text[self.place] != token:
            return False
        self.place += 1
        self.length = min(most, self.length + 1)
        return True

    def begin(self, text: array[int], place: int, tokens: array[int], end: int, most: int) -> None:
        """A new one, of those tokens before `place` that also stand before `end` of the request's."""
        most = min(most, place, end)
        length = 0
        while length < most and text[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        self.text, self.place, self.length = text, place, length


@dataclass(slots=True)
class Reader:
    """How far a request has been read, where its pairs of tokens and its tokens stood last, and what its end matches:
    in its own tokens, and in an output of its namespace."""

    num_read: int = 0
    pairs: Places = field(default_factory=dict)
    singles: Places = field(default_factory=dict)
    own: Match = field(default_factory=Match)
    recent: Match = field(default_factory=Match)

    def skip_to(self, end: int, tokens: array[int]) -> None:
        """Read up to `end` without looking for matches."""
        first = max(0, self.num_read - 1)
        self.pairs.update(zip(_pairs(tokens[first:end]), range(first + 2, end + 1), strict=True))
        self.singles.update(zip(tokens[self.num_read : end], range(self.num_read + 1, end + 1), strict=True))
        self.num_read = end
        self.own.length = self.recent.length = 0


class Ngram:
    """The proposer, for one scheduler.

    Of each request that was asked about it keeps about 150 bytes a token until the request has `ended`: less than a
    hundredth of the KV of a small model. The outputs of ended ones stay, `ngram_capacity` tokens of all namespaces
    together; the oldest output goes first.
    """

    def __init__(self, options: SpeculationOptions) -> None:
        self._depth = options.ngram_max_trie_depth
        self._capacity = options.ngram_capacity
        self._readers: dict[int, Reader] = {}  # by the request's id
        self._outputs: dict[int, tuple[str, array[int]]] = {}  # by number, oldest first, with the namespace
        self._places: dict[str, Places] = {}  # by namespace, of pairs: number << 32 | place
        self._num_ended = 0
        self.num_kept_tokens = 0

    def propose(self, req: Request, most: int) -> Sequence[int]:
        """Guesses of what follows `req.tokens`, `most` of them at most and often none.

        Whatever was appended since the last call is read now, one place at a time: the cost is that of the new tokens,
        whether they were retracted and computed again in between or not.
        """
        reader = self._readers.get(req.id)
        if reader is None:
            reader = self._readers[req.id] = Reader()
        tokens = req.tokens
        if len(tokens) - reader.num_read > MANY:
            reader.skip_to(len(tokens) - 1, tokens)
        namespace = req.cache_namespace if reader.num_read < len(tokens) else ""
        while reader.num_read < len(tokens):
            self._read(reader, tokens, namespace)
        own, recent = reader.own, reader.recent
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
        """What was kept of it goes, and its output becomes one of those that its namespace is guessed from."""
        self._readers.pop(req.id, None)
        output = req.tokens[req.num_prompt :][-self._capacity :]
        if len(output) < 3:  # a pair, and what followed
            return
        self._num_ended += 1
        namespace = req.cache_namespace
        self._outputs[self._num_ended] = (namespace, output)
        self.num_kept_tokens += len(output)
        places, first = self._places.setdefault(namespace, {}), self._num_ended << _BITS
        places.update(zip(_pairs(output[:-1]), range(first + 2, first + len(output)), strict=True))
        while self.num_kept_tokens > self._capacity:
            self._evict()

    def _evict(self) -> None:
        number = next(iter(self._outputs))
        namespace, output = self._outputs.pop(number)
        self.num_kept_tokens -= len(output)
        places = self._places[namespace]
        for pair in _pairs(output[:-1]):
            if places.get(pair, 0) >> _BITS == number:
                del places[pair]
        if not places:
            del self._places[namespace]

    def _read(self, reader: Reader, tokens: array[int], namespace: str) -> None:
        """One token more."""
        place, depth = reader.num_read, self._depth
        end = reader.num_read = place + 1
        token = tokens[place]
        pair = tokens[place - 1] << _BITS | token if place else -1
        if not reader.own.goes_on(token, depth):
            before = reader.pairs.get(pair) or reader.singles.get(token, 0)
            reader.own.begin(tokens, before, tokens, end, depth)
        if place:
            reader.pairs[pair] = end
        reader.singles[token] = end
        if reader.recent.goes_on(token, depth):
            return
        reader.recent.length = 0
        found = self._places.get(namespace, {}).get(pair)
        if found is not None:
            output = self._outputs[found >> _BITS][1]
            reader.recent.begin(output, found & ((1 << _BITS) - 1), tokens, end, depth)


def _pairs(tokens: array[int]) -> list[int]:
    """Each token but the first, with the one before it."""
    ids = np.frombuffer(tokens, dtype=np.int32).astype(np.int64)
    pairs: list[int] = (ids[:-1] << _BITS | ids[1:]).tolist()
    return pairs
