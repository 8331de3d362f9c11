"""A bounded memory of grammars."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from forebay.requests.sampling_params import Grammar

MAX_GRAMMARS: Final = 256
MAX_CHARS: Final = 1 << 20  # of all their texts: what is compiled takes up to 300 bytes for each

V = TypeVar("V")


class Latest(Generic[V]):
    """The grammars that were used latest, up to a limit and at least one."""

    def __init__(self) -> None:
        self._known: OrderedDict[Grammar, V] = OrderedDict()  # the latest used last
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._known)

    def use(self, grammar: Grammar) -> V | None:
        """Return the value stored for the grammar, and mark it as the most recently used; None if there is none."""
        if grammar in self._known:
            self._known.move_to_end(grammar)
        return self._known.get(grammar)

    def keep(self, grammar: Grammar, known: V) -> None:
        """Store the value, and evict the least recently used ones beyond `MAX_GRAMMARS` or `MAX_CHARS`."""
        self.drop(grammar)
        self._known[grammar] = known
        self._num_chars += len(grammar.text)
        while len(self) > MAX_GRAMMARS or (self._num_chars > MAX_CHARS and len(self) > 1):
            self.drop(next(iter(self._known)))

    def drop(self, grammar: Grammar) -> None:
        """Nothing if it is not known."""
        if self._known.pop(grammar, None) is not None:
            self._num_chars -= len(grammar.text)
