"""The tokens that an indexer selected, for the layer itself and those that share them.

Shape letters: T tokens, N tokens that are selected at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv


@dataclass(slots=True, kw_only=True)
class Selection:
    """positions [T, N] int32, ascending and -1 behind them, and counts [T] int32, as `SelectionOps.select_tokens`
    returns them; `paged` are the sequences."""

    positions: Tensor
    counts: Tensor
    paged: PagedKv
    _pages: PagedKv | None = field(default=None, init=False)

    def pages(self, ops: Ops) -> PagedKv:
        """Return the tokens as sequences over full KV, see `SelectionOps.token_pages`; computed once."""
        if self._pages is None:
            self._pages = ops.selection.token_pages(self.positions, self.counts, self.paged)
        return self._pages
