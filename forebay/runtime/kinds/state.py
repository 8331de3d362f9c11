"""Recurrent states on the device: where steps read them, write them and leave snapshots.

Shape letters: S sequences, T tokens, K snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from forebay.layers.states import States
from forebay.memory.kinds.state.hybrid_rows import STATE
from forebay.memory.slots import PAD
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool
from forebay.pools.table import Column
from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.host.packing import Array
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.kind import Columns, DeviceKind

# Where a decode also leaves its state, PAD for nowhere, once it is that of so many tokens. The field's
# `mamba_track_mask` is where the two meet.
TRACKED: Final[Mapping[str, Column]] = {
    "mamba_track_indices": Column(torch.int32, pad=PAD),
    "mamba_track_lens": Column(torch.int64, pad=0),
}


class RecurrentStates(DeviceKind):
    """The layers' input is `States`."""

    name: ClassVar[str] = STATE
    derived: ClassVar[Mapping[str, torch.dtype]] = {
        "snap_start": torch.int32,  # [S + 1]
        "snap_ends": torch.int32,  # [K], which of the T, exclusive
        "snap_lens": torch.int64,  # [K]
        "mamba_track_indices": torch.int32,  # [S], of a step that only decodes
        "mamba_track_lens": torch.int64,  # [S]
        "write_slots": torch.int32,  # [S], of a step that verifies
    }
    decode_columns: ClassVar[Mapping[str, Column]] = TRACKED
    # `write_slots`: where the model leaves the state of a sequence.
    verify_columns: ClassVar[Mapping[str, Column]] = {"write_slots": Column(torch.int32, pad=PAD), **TRACKED}
    # Snapshots; one with slot PAD is none, wherever it ends.
    token_columns: ClassVar[Mapping[str, Column]] = {
        "snap_ends": Column(torch.int32, pad=0),
        "snap_lens": Column(torch.int64, pad=0),
        "snap_slots": Column(torch.int32, pad=PAD),
    }
    end_columns: ClassVar[Mapping[str, str]] = {"snap_stops": "snap_start"}

    def __init__(self, cache: CachePool, ops: Ops, counts: Tensor) -> None:
        super().__init__(cache, ops, counts)
        self._states = cache.tables[STATE]
        self._counts, self._zeros = counts, torch.zeros_like(counts)
        none = counts[:0]
        self._nothing = States(
            StateBatch(
                slots=none,
                write_slots=none,
                q_start=none,
                q_stop=none,
                snap_start=none,
                snap_ends=none,
                snap_slots=none,
                positions=none,
            )
        )

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool unless the plan's state slots are valid.

        The model and the copies before it write each slot at most once and never the padding slot. Snapshots lie inside
        the tokens that the step computes, in order."""
        work = plan.kinds.state
        if _nothing(plan):
            return
        if len(work.clears) or len(work.copy_dst):
            _once("copy_src, clears and copy_dst", np.unique(work.copy_src), work.clears, work.copy_dst)
        if not len(work.snap_seqs):
            _once("state_slots", work.state_slots)
        else:
            _once("state_slots and snap_slots", work.state_slots, work.snap_slots)
            _check_snapshots(plan)

    def arrays(self, plan: StepPlan, shape: Shape, q_start: Array) -> dict[str, Array]:
        if _nothing(plan):
            return {}
        match shape:
            case Shape.DECODES:
                return _tracked(plan)
            case Shape.DRAFTS:
                return _written(plan) | _tracked(plan)
            case Shape.TOKENS:
                return _snapshots(plan, q_start)

    def change(self, columns: Mapping[str, Tensor]) -> None:
        if "clears" in columns:
            self._states.reset_rows(columns["clears"])
        if "copy_src" in columns:
            self._cache.mover.copy(STATE, columns["copy_src"], columns["copy_dst"])

    def inputs(self, shape: Shape, columns: Columns, q_start: Tensor, positions: Tensor) -> States:
        match shape:
            case Shape.DECODES:
                slots, lens = columns["mamba_track_indices"], columns["mamba_track_lens"]
                due = self._ops.steps.due(slots, q_start[1:], lens, positions)
                return States(_batch(columns, positions, q_start, q_start[1:], q_start, q_start[1:], due))
            case Shape.DRAFTS:
                # No state follows these tokens: the ops are recorded, and run again for those that are accepted.
                zeros = self._zeros
                batch = _batch(columns, positions, q_start, q_start[1:], zeros, zeros[:0], zeros[:0])
                return States(replace(batch, write_slots=columns["write_slots"]), ran=[])
            case Shape.TOKENS:
                slots, ends, lens = (columns[name] for name in ("snap_slots", "snap_ends", "snap_lens"))
                due = self._ops.steps.due(slots, ends, lens, positions)
                return States(_batch(columns, positions, q_start, q_start[1:], columns["snap_start"], ends, due))

    def layer_input(self, full: PagedKv, inputs: States | None) -> States:
        return self._nothing if inputs is None else inputs

    @property
    def settles(self) -> bool:
        return True

    def settle(self, inputs: States, columns: Columns, q_start: Tensor, positions: Tensor, num_new: Tensor) -> None:
        wishes = columns["mamba_track_lens"], columns["mamba_track_indices"]
        stops = self._ops.steps.accepted_stops(q_start, num_new, positions, columns["write_slots"], *wishes)
        q_stop, ends, due = stops
        batch = _batch(columns, positions, q_start, q_stop, self._counts, ends, due)
        for op in inputs.ran or ():
            op(batch)


def _nothing(plan: StepPlan) -> bool:
    """Return True if the plan has no sequence with a state."""
    return not len(plan.kinds.state.state_slots)


def _tracked(plan: StepPlan) -> dict[str, Array]:
    """Return the snapshots of a step that only decodes: a sequence has one at most."""
    work = plan.kinds.state
    if not len(work.snap_seqs):
        return {}
    arrays = {name: np.zeros(plan.num_seqs, dtype=np.int64) for name in TRACKED}
    arrays["mamba_track_indices"][work.snap_seqs] = work.snap_slots
    arrays["mamba_track_lens"][work.snap_seqs] = work.snap_lens
    return arrays


def _written(plan: StepPlan) -> dict[str, Array]:
    """Return the slots to which a step of decodes with drafts writes states: PAD if it is not certain which tokens
    stay, or a snapshot is requested. These are written behind the step."""
    work = plan.kinds.state
    written = np.where(plan.q_lens > 1, PAD, work.state_slots)
    written[work.snap_seqs] = PAD
    return {"write_slots": written}


def _snapshots(plan: StepPlan, q_start: Array) -> dict[str, Array]:
    """Return the snapshots of a step of any tokens; those of decodes, behind their only token, are wishes."""
    work = plan.kinds.state
    arrays: dict[str, Array] = {"snap_start": np.zeros(plan.num_seqs + 1, dtype=np.int64)}
    if len(seqs := work.snap_seqs):
        np.cumsum(np.bincount(seqs, minlength=plan.num_seqs), out=arrays["snap_start"][1:])
        left = np.zeros(len(seqs), dtype=np.int64)
        known = seqs < plan.num_extends
        left[known] = plan.ends[seqs[known]] - work.snap_lens[known]
        arrays |= {"snap_ends": q_start[1:][seqs] - left, "snap_lens": work.snap_lens}
    return arrays


def _check_snapshots(plan: StepPlan) -> None:
    """Check that the snapshots of extends lie inside the computed tokens, and in order; a decode has one at most."""
    seqs, lens = plan.kinds.state.snap_seqs, plan.kinds.state.snap_lens
    if (np.diff(seqs * (lens.max() + 1) + lens) <= 0).any():
        raise IndexOutOfPool(f"snap_seqs {seqs} at snap_lens {lens} are not in order")
    decodes = seqs[seqs >= plan.num_extends]
    if (np.diff(decodes) == 0).any():
        raise IndexOutOfPool(f"snap_seqs {seqs}: a decode has one snapshot at most")
    known = len(seqs) - len(decodes)
    seqs, lens = seqs[:known], lens[:known]
    if (lens <= plan.starts[seqs]).any() or (lens > plan.ends[seqs]).any():
        raise IndexOutOfPool(f"snap_lens {lens} lie outside of what the step computes, up to {plan.ends[seqs]}")


def _batch(columns: Columns, positions: Tensor, q_start: Tensor, q_stop: Tensor, *snapshots: Tensor) -> StateBatch:
    slots, (snap_start, snap_ends, snap_slots) = columns["state_slots"], snapshots
    return StateBatch(
        slots=slots,
        write_slots=slots,
        q_start=q_start,
        q_stop=q_stop,
        snap_start=snap_start,
        snap_ends=snap_ends,
        snap_slots=snap_slots,
        positions=positions,
    )


def _once(name: str, *slots: Array) -> None:
    """Raise IndexOutOfPool for a slot, other than PAD, that occurs twice in all of them together."""
    counts = np.bincount(slots[0] if len(slots) == 1 else np.concatenate(slots), minlength=1)
    counts[PAD] = 0
    if counts.max() > 1:
        raise IndexOutOfPool(f"{name} of a plan name slots {np.flatnonzero(counts > 1).tolist()} more than once")


DEVICE_KIND: Final = RecurrentStates
