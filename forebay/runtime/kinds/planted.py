"""Faults of kinds of cache that change tokens, see `engine/loop/planted.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from forebay.base.fault import Planted
from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.packing import Array
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.state import RecurrentStates


def _state_late() -> Planted:
    """A snapshot of a prompt's state lacks the last token that it is kept for."""
    arrays = RecurrentStates.arrays

    def faulty(self: RecurrentStates, plan: StepPlan, shape: Shape, q_start: Array) -> dict[str, Array]:
        found = arrays(self, plan, shape, q_start)
        if shape is Shape.TOKENS and "snap_ends" in found:
            is_late = found["snap_ends"] > q_start[plan.kinds.state.snap_seqs] + 1
            found |= {name: found[name] - is_late for name in ("snap_ends", "snap_lens")}
        return found

    return Planted(RecurrentStates, "arrays", faulty)


def _uncleared_slot() -> Planted:
    """A state's slot holds what its last request left there."""
    change = RecurrentStates.change

    def faulty(self: RecurrentStates, columns: Mapping[str, Tensor]) -> None:
        change(self, {name: column for name, column in columns.items() if name != "clears"})

    return Planted(RecurrentStates, "change", faulty)


KIND_PLANTS: Final[Mapping[str, Callable[[], Planted]]] = {
    "state_late": _state_late,
    "uncleared_slot": _uncleared_slot,
}
