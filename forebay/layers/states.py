"""The recurrent states of a step's sequences, for the layers that keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVarTuple

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_spec import RecurrentState

Inputs = TypeVarTuple("Inputs")


@dataclass(frozen=True, slots=True)
class States:
    """Runs the ops that read and write recurrent states.

    `ran` records those ops in a step that verifies draft tokens: they run again, on another batch, for the tokens that
    were accepted. None in all other steps.
    """

    batch: StateBatch
    ran: list[Callable[[StateBatch], Tensor]] | None = None

    @classmethod
    def of(cls, ctx: ForwardContext) -> States:
        """Return the states of the step."""
        states: States = ctx.kinds[RecurrentState.kind]
        return states

    def run(self, op: Callable[[*Inputs, StateBatch], Tensor], *inputs: *Inputs) -> Tensor:
        """Apply an op to the states, and record it if accepted tokens will be run again."""
        if self.ran is not None:
            self.ran.append(lambda batch: op(*inputs, batch))
        return op(*inputs, self.batch)
