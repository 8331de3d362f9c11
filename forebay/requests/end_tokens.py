"""The tokens of a model that end an answer."""

from __future__ import annotations

from collections.abc import Iterable


class EndTokens:
    """End tokens of one engine, in the order in which they were named. Ids beyond the vocabulary are left out: no
    answer has them."""

    def __init__(self, ids: Iterable[int] = (), *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids: tuple[int, ...] = ()
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """Add ids, each once."""
        known = dict.fromkeys(self.ids)
        self.ids = tuple(known | dict.fromkeys(token for token in ids if 0 <= token < self.vocab_size))
