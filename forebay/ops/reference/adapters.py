"""The ops of LoRA adapters, for every backend. arXiv 2106.09685, section 4.1.

Shape letters: T tokens, N and K a linear layer's outputs and inputs, J layers that a weight joins, P panels of outputs;
S slots of adapters besides the padding, R the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PANEL: Final = 32  # outputs, kPanel of cpu/linear.h

Panel = tuple[int, int, int]
"""The first output, the number of outputs, and the joined layer that they belong to."""


def panels_of(layers: Sequence[int] | npt.NDArray[np.int64]) -> list[Panel]:
    """Divide a weight's outputs into panels of one joined layer each; `layers` [N] has the layer of each output."""
    of = np.asarray(layers)
    edges = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
    runs = [(first, end, int(of[first])) for first, end in pairwise(edges)]
    return [(at, min(PANEL, end - at), layer) for first, end, layer in runs for at in range(first, end, PANEL)]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTable:
    """The adapters of one weight, by slot; slot 0 is the padding, and has none.

    `a` [S + 1, J, R, K] and `b` [S + 1, P, R, PANEL] have one dtype: float32, or bfloat16 with any inputs. Of a slot
    and a joined layer the first `ranks` [S + 1, J] int32 rows are in use; the rows behind them are never read.
    `panels` [P, 3] int32 has a `Panel` for each panel of `b`.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    panels: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.a, self.b, self.ranks, self.panels))


class AdapterOps:
    """Sums of a layer's outputs and what an adapter adds to them."""

    def add(self, out: Tensor, x: Tensor, slots: Tensor, table: AdapterTable) -> None:
        """out[t] += B[s] (A[s] x[t]) in place, for s = slots[t] > 0. A token with slot 0 keeps its bits.

        out [T, N], contiguous, and x [T, K] in one dtype, slots [T] int32. Computed in float32 in an order that depends
        on the slot's rank alone, and rounded once: so a token's bits do not depend on the other tokens.
        """
        at, counts, layers = (column.long() for column in table.panels.unbind(1))
        columns = at[:, None] + torch.arange(PANEL, device=at.device)
        live = columns < (at + counts)[:, None]
        for slot in range(1, len(table.ranks)):
            tokens = (slots == slot).nonzero()
            for layer, rank in enumerate(table.ranks[slot].tolist()):
                own = layers == layer
                inner = x[tokens[:, 0]].float() @ table.a[slot, layer, :rank].float().T
                outer = table.b[slot, own, :rank].float().transpose(0, 1)[:, live[own]]
                place = tokens, columns[own][live[own]]
                if rank:
                    out[place] = (out[place].float() + inner @ outer).to(out.dtype)
