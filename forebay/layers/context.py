"""The facts that a layer may use about the step it runs in. No ambient state: this is an argument. T is the number of
tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVarTuple

from torch import Tensor

from forebay.ops.attention import PagedKv
from forebay.ops.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool

Inputs = TypeVarTuple("Inputs")


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent states of a step's sequences: what reads and writes them is run through here. Where nobody knows
    yet which of the tokens stay, `ran` gets all that is to be run again for those that do, on another batch."""

    batch: StateBatch
    ran: list[Callable[[StateBatch], Tensor]] | None = None

    def run(self, op: Callable[[*Inputs, StateBatch], Tensor], *inputs: *Inputs) -> Tensor:
        """Apply an op to the states, and record it if accepted tokens will be run again."""
        if self.ran is not None:
            self.ran.append(lambda batch: op(*inputs, batch))
        return op(*inputs, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """The tokens of all sequences, one sequence after the other, as `full` and `states` divide them.

    A sequence's positions are contiguous and end with its length; attention is causal. `full` is for layers that keep
    all tokens; `window`, whose pages behind the window are not there any more, for those with a sliding window, and the
    same as `full` where no layer has one. `states` names the recurrent states. `per_layer` is what each of L layers is
    given of each token beside the residual stream, side by side, in models that have such inputs.
    """

    positions: Tensor  # [T] int64
    full: PagedKv
    window: PagedKv
    states: States
    cache: CachePool
    per_layer: Tensor | None = None  # [T, L * P]
