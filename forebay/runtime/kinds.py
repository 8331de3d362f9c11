"""The device's side of the kinds of cache beside full KV: all that the runtime knows of windows and of states.

Shape letters: S sequences, T tokens, K snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from forebay.memory.slots import PAD
from forebay.ops.attention import PagedKv
from forebay.ops.recurrence import StateBatch
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
    "mamba_track_indices": torch.int32,  # [S], of a step that only decodes
}
# An input of captured decode steps: where the state goes too, PAD for nowhere. The field's `mamba_track_mask` is where
# it is not PAD: one fact, one column.
TRACKED: Final[Mapping[str, Column]] = {"mamba_track_indices": Column(torch.int32, pad=PAD)}
# Inputs of captured steps with prompts; one with slot PAD is none, wherever it ends.
STOPS: Final[Mapping[str, Column]] = {
    "snap_ends": Column(torch.int32, pad=0),
    "snap_slots": Column(torch.int32, pad=PAD),
}


class KindTokens(NamedTuple):
    """What layers are told of a step's tokens besides where full KV lies; empty where no layer keeps such."""

    out_window_loc: Tensor  # [T] int64
    states: StateBatch


class Columns(Protocol):
    def __getitem__(self, name: str, /) -> Tensor: ...


def arrays_of_kinds(plan: StepPlan, q_start: Array) -> dict[str, Array]:
    """Stops as the ops take them. In a step that only decodes a sequence has one at most."""
    if not len(plan.states.state_slots):
        return {}
    seqs, snap_start = plan.states.snap_seqs, np.zeros(plan.num_seqs + 1, dtype=np.int64)
    arrays: dict[str, Array] = {"snap_start": snap_start}
    if plan.num_extends == 0:
        arrays["mamba_track_indices"] = tracked = np.full(plan.num_seqs, PAD, dtype=np.int64)
        tracked[seqs] = plan.states.snap_slots
    if len(seqs):
        np.cumsum(np.bincount(seqs, minlength=plan.num_seqs), out=snap_start[1:])
        arrays["snap_ends"] = q_start[1:][seqs] - (plan.seq_lens[seqs] - plan.states.snap_lens)
    return arrays


def change_kinds(cache: CachePool, sections: Mapping[str, Tensor]) -> None:
    """What a step changes of the caches before the model runs, in the order that `StepPlan` says."""
    if cache.windows is not None and "map_pages" in sections:
        cache.windows.full_to_window.index_copy_(0, sections["map_pages"], sections["map_windows"])
    if "clears" in sections:
        cache.tables[Per.SLOT].reset_rows(sections["clears"])
    if "copy_src" in sections:
        cache.tables[Per.SLOT].copy_rows(sections["copy_src"], sections["copy_dst"])


def of_layers(cache: CachePool, full: PagedKv, tokens: KindTokens) -> dict[str, Any]:
    """What layers are told, by its names in `ForwardContext`."""
    window = full
    if cache.windows is not None:
        window = replace(full, out_cache_loc=tokens.out_window_loc, page_map=cache.windows.full_to_window)
    return {"window": window, "states": tokens.states}


def check_kinds(plan: StepPlan) -> None:
    """Raise IndexOutOfPool unless the model and the copies before it write each state slot at most once, never the
    padding slot, and snapshots lie inside what the step computes, in order."""
    work = plan.states
    if not len(work.state_slots):
        return
    if len(work.clears) or len(work.copy_dst):
        _once("copy_src, clears and copy_dst", np.unique(work.copy_src), work.clears, work.copy_dst)
    if not len(seqs := work.snap_seqs):
        _once("state_slots", work.state_slots)
    else:
        _once("state_slots and snap_slots", work.state_slots, work.snap_slots)
        lens, stops = work.snap_lens, plan.seq_lens[seqs]
        left = stops - lens
        if (left < 0).any() or (left >= plan.q_lens[seqs]).any():
            raise IndexOutOfPool(f"snap_lens {lens} lie outside of what the step computes, up to {stops}")
        if (np.diff(seqs * (plan.seq_lens.max() + 1) + lens) <= 0).any():
            raise IndexOutOfPool(f"snap_seqs {seqs} at snap_lens {lens} are not in order")


def of_step(columns: Columns) -> KindTokens:
    """Of a step of any shape."""
    return of_prompts(columns, q_start=columns["q_start"], snap_start=columns["snap_start"])


def of_prompts(columns: Columns, *, q_start: Tensor, snap_start: Tensor) -> KindTokens:
    """As of_step, where the sequences' bounds stand elsewhere."""
    states = StateBatch(
        slots=columns["state_slots"],
        write_slots=columns["state_slots"],
        q_start=q_start,
        snap_start=snap_start,
        snap_ends=columns["snap_ends"],
        snap_slots=columns["snap_slots"],
    )
    return KindTokens(columns["out_window_loc"], states)


def of_decodes(columns: Columns, counts: Tensor) -> KindTokens:
    """Of a token of each sequence; `counts` are 0, 1, 2 and so on up to their number."""
    states = StateBatch(
        slots=columns["state_slots"],
        write_slots=columns["state_slots"],
        q_start=counts,
        snap_start=counts,
        snap_ends=counts[1:],
        snap_slots=columns["mamba_track_indices"],
    )
    return KindTokens(columns["out_window_loc"], states)


def _once(name: str, *slots: Array) -> None:
    """No slot but PAD stands twice in all of them together."""
    counts = np.bincount(slots[0] if len(slots) == 1 else np.concatenate(slots), minlength=1)
    counts[PAD] = 0
    if counts.max() > 1:
        raise IndexOutOfPool(f"{name} of a plan name slots {np.flatnonzero(counts > 1).tolist()} more than once")
