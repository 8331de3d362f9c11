"""The device's side of the kinds of cache beside full KV: all that the runtime knows of windows and of states.

Shape letters: S sequences, T tokens, K snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from forebay.layers.context import States
from forebay.memory.slots import PAD
from forebay.ops import Ops
from forebay.ops.attention import PagedKv
from forebay.ops.recurrence import StateBatch
from forebay.ops.steps import Pages, Placement
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import Per
from forebay.pools.table import Column
from forebay.requests.step_plan import StepPlan
from forebay.runtime.bounds import IndexOutOfPool
from forebay.runtime.packing import Array

# What the device is told besides the plan's own columns.
DERIVED: Final = {
    "snap_start": torch.int32,  # [S + 1]
    "snap_ends": torch.int32,  # [K], which of the T, exclusive
    "snap_lens": torch.int64,  # [K]
    "mamba_track_indices": torch.int32,  # [S], of a step that only decodes
    "mamba_track_lens": torch.int64,  # [S]
    "write_slots": torch.int32,  # [S], of a step that verifies
}
# Inputs of captured steps of decodes: where the state goes too, PAD for nowhere, once it is that of so many tokens. The
# field's `mamba_track_mask` is where the two meet.
TRACKED: Final[Mapping[str, Column]] = {
    "mamba_track_indices": Column(torch.int32, pad=PAD),
    "mamba_track_lens": Column(torch.int64, pad=0),
}
# Inputs of captured steps that verify: where the model leaves the state of a sequence.
WRITTEN: Final[Mapping[str, Column]] = {"write_slots": Column(torch.int32, pad=PAD), **TRACKED}
# Inputs of captured steps with prompts; one with slot PAD is none, wherever it ends.
STOPS: Final[Mapping[str, Column]] = {
    "snap_ends": Column(torch.int32, pad=0),
    "snap_lens": Column(torch.int64, pad=0),
    "snap_slots": Column(torch.int32, pad=PAD),
}
# What layers are told of a step's tokens besides where KV lies.
KindTokens = States
# What a layer ran on them, to be run again.
Ran = Callable[[StateBatch], Tensor]


class Columns(Protocol):
    def __getitem__(self, name: str, /) -> Tensor: ...


def _nothing(plan: StepPlan) -> bool:
    """Whether sequences keep nothing but what they attend to."""
    return not len(plan.kinds.state.state_slots)


def stops_of_decodes(plan: StepPlan) -> dict[str, Array]:
    """Return the stops of a step that only decodes: a sequence has one at most."""
    work = plan.kinds.state
    if not len(work.snap_seqs):
        return {}
    arrays = {name: np.zeros(plan.num_seqs, dtype=np.int64) for name in TRACKED}
    arrays["mamba_track_indices"][work.snap_seqs] = work.snap_slots
    arrays["mamba_track_lens"][work.snap_seqs] = work.snap_lens
    return arrays


def stops_of_drafts(plan: StepPlan) -> dict[str, Array]:
    """Return the stops of a step of decodes with drafts. Where it is not certain what stays, or a state is wished for,
    the slot is written behind the step."""
    if _nothing(plan):
        return {}
    written = np.where(plan.q_lens > 1, PAD, plan.kinds.state.state_slots)
    written[plan.kinds.state.snap_seqs] = PAD
    return {"write_slots": written, **stops_of_decodes(plan)}


def stops_of_tokens(plan: StepPlan, q_start: Array) -> dict[str, Array]:
    """Return the stops of a step of any shape; those of decodes, which stand behind their only token, are wishes."""
    work = plan.kinds.state
    if _nothing(plan):
        return {}
    arrays: dict[str, Array] = {"snap_start": np.zeros(plan.num_seqs + 1, dtype=np.int64)}
    if len(seqs := work.snap_seqs):
        np.cumsum(np.bincount(seqs, minlength=plan.num_seqs), out=arrays["snap_start"][1:])
        left = np.zeros(len(seqs), dtype=np.int64)
        known = seqs < plan.num_extends
        left[known] = plan.ends[seqs[known]] - work.snap_lens[known]
        arrays |= {"snap_ends": q_start[1:][seqs] - left, "snap_lens": work.snap_lens}
    return arrays


def change_kinds(cache: CachePool, sections: Mapping[str, Tensor]) -> None:
    """Apply a step's changes of the caches before the model runs, in the order that `StepPlan` says."""
    if cache.full_to_window is not None and "map_pages" in sections:
        cache.full_to_window.index_copy_(0, sections["map_pages"], sections["map_windows"])
    if "clears" in sections:
        cache.tables[Per.SLOT].reset_rows(sections["clears"])
    if "copy_src" in sections:
        cache.tables[Per.SLOT].copy_rows(sections["copy_src"], sections["copy_dst"])


def pages_of(cache: CachePool, table: Tensor) -> Pages:
    """Where a row's pages are, in all caches that have pages."""
    return Pages(table, cache.page_size, cache.full_to_window)


def of_layers(cache: CachePool, full: PagedKv, placed: Placement, tokens: KindTokens) -> dict[str, Any]:
    """Return the inputs of layers, by their names in `ForwardContext`."""
    window = full
    if cache.full_to_window is not None:
        window = replace(full, out_cache_loc=placed.out_window_loc, page_map=cache.full_to_window)
    return {"window": window, "states": tokens}


def check_kinds(plan: StepPlan) -> None:
    """Raise IndexOutOfPool unless the model and the copies before it write each state slot at most once, never the
    padding slot, and snapshots lie inside what the step computes, in order."""
    work = plan.kinds.state
    if _nothing(plan):
        return
    if len(work.clears) or len(work.copy_dst):
        _once("copy_src, clears and copy_dst", np.unique(work.copy_src), work.clears, work.copy_dst)
    if not len(work.snap_seqs):
        _once("state_slots", work.state_slots)
    else:
        _once("state_slots and snap_slots", work.state_slots, work.snap_slots)
        _check_stops(plan)


def _check_stops(plan: StepPlan) -> None:
    """Check that the stops of extends lie inside what is computed, and in order; a decode has one at most."""
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


def no_kinds(device: torch.device) -> KindTokens:
    """Return the inputs of a step whose layers have no such kind."""
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return States(StateBatch(**{field.name: nothing for field in fields(StateBatch)}))


def of_prompts(
    columns: Columns, *, q_start: Tensor, snap_start: Tensor, positions: Tensor, ops: Ops, cache: CachePool
) -> KindTokens:
    """Return the inputs of a step of any shape."""
    slots, ends, lens = (columns[name] for name in ("snap_slots", "snap_ends", "snap_lens"))
    due = ops.due(slots, ends, lens, positions) if cache.has(Per.SLOT) else slots
    return States(_batch(columns, q_start, q_start[1:], snap_start, ends, due))


def of_decodes(columns: Columns, counts: Tensor, *, positions: Tensor, ops: Ops, cache: CachePool) -> KindTokens:
    """Return the inputs of one token of each sequence; `counts` are 0, 1, 2 and so on up to their number."""
    slots, lens = columns["mamba_track_indices"], columns["mamba_track_lens"]
    due = ops.due(slots, counts[1:], lens, positions) if cache.has(Per.SLOT) else slots
    return States(_batch(columns, counts, counts[1:], counts, counts[1:], due))


def of_drafts(columns: Columns, q_start: Tensor, zeros: Tensor) -> KindTokens:
    """Return the inputs of tokens that are verified: no state follows them, and what ran is there to be run again.
    `zeros` are one more than sequences."""
    batch = _batch(columns, q_start, q_start[1:], zeros, zeros[:0], zeros[:0])
    return States(replace(batch, write_slots=columns["write_slots"]), ran=[])


def of_accepted(
    columns: Columns, q_start: Tensor, counts: Tensor, positions: Tensor, num_new: Tensor, ops: Ops
) -> StateBatch:
    """Return the inputs of accepted tokens, num_new [S] of each sequence; `counts` are 0, 1, 2 and so on up to their
    number."""
    wishes = columns["mamba_track_lens"], columns["mamba_track_indices"]
    q_stop, ends, due = ops.accepted_stops(q_start, num_new, positions, columns["write_slots"], *wishes)
    return _batch(columns, q_start, q_stop, counts, ends, due)


def settles(cache: CachePool) -> bool:
    """Whether there is something to run again."""
    return cache.has(Per.SLOT)


def _batch(columns: Columns, q_start: Tensor, q_stop: Tensor, *snapshots: Tensor) -> StateBatch:
    slots, (snap_start, snap_ends, snap_slots) = columns["state_slots"], snapshots
    return StateBatch(
        slots=slots,
        write_slots=slots,
        q_start=q_start,
        q_stop=q_stop,
        snap_start=snap_start,
        snap_ends=snap_ends,
        snap_slots=snap_slots,
    )


def _once(name: str, *slots: Array) -> None:
    """No slot but PAD stands twice in all of them together."""
    counts = np.bincount(slots[0] if len(slots) == 1 else np.concatenate(slots), minlength=1)
    counts[PAD] = 0
    if counts.max() > 1:
        raise IndexOutOfPool(f"{name} of a plan name slots {np.flatnonzero(counts > 1).tolist()} more than once")
