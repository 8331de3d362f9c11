"""A step's plan on its way to the device.

Shape letters: S sequences, T tokens, E tokens of extends, N sequences that sample, D of them that draw (are not
greedy), L of them that want log-probabilities, W row writes, A admissions, X positions of prompts whose
log-probabilities are wanted, M window page writes, K snapshots, C clears and B copies of state slots, H pages and slots
that are saved to the host or loaded from there. Sections about what the model does not keep are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from forebay.memory.slots import PAD, Ids
from forebay.ops.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows, SamplingRows
from forebay.pools.window_pages import WindowPages
from forebay.requests.step_plan import Admission, StepPlan
from forebay.runtime.forward import StepTokens
from forebay.runtime.host_copies import HostCopies, Places
from forebay.runtime.packing import Array, Packing

SAMPLING_COLUMNS: Final = tuple(SamplingRows.declared)

_SECTIONS: Final = {
    "rows": torch.int32,  # [S]
    "q_start": torch.int32,  # [S + 1]
    "seq_lens": torch.int32,  # [S]
    "positions": torch.int64,  # [T]
    "out_cache_loc": torch.int64,  # [T]
    "input_ids": torch.int64,  # [T]
    "decode_rows": torch.int64,
    "sample_tokens": torch.int64,  # [N], which of the T
    "sample_rows": torch.int32,  # [N]
    "sample_seqs": torch.int64,  # [N], which of the S; of a step with extends
    "sample_lens": torch.int64,  # [N]
    "drawing": torch.int64,  # [D], which of the N
    "reporting": torch.int64,  # [L], which of the N
    "write_rows": torch.int64,  # [W]
    "write_columns": torch.int64,  # [W]
    "write_pages": torch.int32,  # [W]
    "targets": torch.int64,  # [X]: the token whose log-probability is wanted
    "out_window_loc": torch.int64,  # [T]
    "map_pages": torch.int64,  # [M]
    "map_windows": torch.int32,  # [M]
    "state_slots": torch.int32,  # [S]
    "snap_start": torch.int32,  # [S + 1]
    "snap_ends": torch.int32,  # [K], which of the T, exclusive
    "snap_slots": torch.int32,  # [K]
    "mamba_track_indices": torch.int32,  # [S], of a step that only decodes
    "clears": torch.int64,  # [C]
    "copy_src": torch.int64,  # [B]
    "copy_dst": torch.int64,  # [B]
    "kept": torch.int64,  # [H]: of each save, then of each load, its pages, its window pages, its slot
    "admit_rows": torch.int64,  # [A]
    **{
        name: torch.float64 if column.dtype.is_floating_point else torch.int64
        for name, column in SamplingRows.declared.items()
    },  # [A] each
}

# Columns of `DecodeInputs` and of `ExtendInputs`, and the sections that hold them.
_COLUMNS: Final = {
    "req_pool_indices": "rows",
    **{name: name for name in ("seq_lens", "positions", "out_cache_loc", "out_window_loc")},
}
_TOKENS: Final = ("rows", "q_start", "seq_lens", "positions", "out_cache_loc", "out_window_loc")  # of `StepTokens`
_DECODE_COLUMNS: Final = {**_COLUMNS, "state_slots": "state_slots", "mamba_track_indices": "mamba_track_indices"}

# A step of as many sequences as tokens has at most this much for each; whatever needs more makes the buffer grow.
_WORDS_PER_TOKEN: Final = sum(-(-dtype.itemsize // 8) for dtype in _SECTIONS.values())


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step's inputs on the device. They are views of a staging buffer: valid until the next step but one begins."""

    sections: Mapping[str, Tensor]
    sample_tokens: Tensor | None  # [N]; None where every token is sampled from
    sample_rows: Tensor  # [N]
    sample_lens: Tensor  # [N]
    drawing: Tensor  # [D]
    reporting: Tensor  # [L]
    targets: Tensor  # [X]


class StepInputs:
    """Carries plans to the device in one copy each, and does there what a plan does before the model runs."""

    def __init__(
        self,
        rows: RequestRows,
        cache: CachePool,
        windows: WindowPages | None,
        copies: HostCopies,
        *,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._windows = windows
        self._copies = copies
        self._packing = Packing(_SECTIONS, device, num_words=_WORDS_PER_TOKEN * max_num_tokens)

    def stage(self, plan: StepPlan, sample_rows: Ids, drawing: Ids, reporting: Ids, targets: Ids) -> Inputs:
        """Send `plan`. `sample_rows` are the rows that sample, `drawing` and `reporting` indices into them, `targets`
        the tokens after each position of the extends in `plan.prompt_logprobs`.
        """
        views = self._packing.begin(_counts(plan, len(sample_rows), len(drawing), len(reporting), len(targets)))
        host, device = views.host, views.device
        host["drawing"][:] = drawing
        host["reporting"][:] = reporting
        host["targets"][:] = targets
        host["sample_rows"][:] = sample_rows
        _write_sequences(plan, host)
        _write_changes(plan, host)
        if len(plan.windows.out_window_loc):
            host["out_window_loc"][:] = plan.windows.out_window_loc
        if len(plan.states.state_slots):
            _write_states(plan, host)
        self._packing.send(views)
        self._change(plan, device)
        return Inputs(
            sections=device,
            sample_tokens=None if len(sample_rows) == plan.num_tokens else device["sample_tokens"],
            sample_rows=device["sample_rows"],
            sample_lens=device["sample_lens"],
            drawing=device["drawing"],
            reporting=device["reporting"],
            targets=device["targets"],
        )

    def _change(self, plan: StepPlan, device: dict[str, Tensor]) -> None:
        """All that comes before the model, in the order that `StepPlan` says."""
        places = _places(plan, device["kept"]) if plan.host.saves or plan.host.loads else []
        for kept, at in zip(plan.host.saves, places, strict=False):
            self._copies.save(kept.request_id, at)
        for request_id in plan.host.drops:
            self._copies.drop(request_id)
        if len(plan.writes.write_rows):
            self._rows.req_to_token.index_put_((device["write_rows"], device["write_columns"]), device["write_pages"])
        if plan.admissions:
            self._admit(device)
        if self._windows is not None and len(plan.windows.map_pages):
            self._windows.full_to_window.index_copy_(0, device["map_pages"], device["map_windows"])
        if len(plan.states.clears):
            self._cache.slots.reset_rows(device["clears"])
        if len(plan.states.copy_src):
            self._cache.slots.copy_rows(device["copy_src"], device["copy_dst"])
        for kept, at in zip(plan.host.loads, places[len(plan.host.saves) :], strict=True):
            self._copies.load(kept.request_id, at)

    def _admit(self, device: dict[str, Tensor]) -> None:
        for name in SAMPLING_COLUMNS:
            column = self._rows[name]
            column.index_copy_(0, device["admit_rows"], device[name].to(column.dtype))

    def decode_columns(self, inputs: Inputs) -> dict[str, Tensor]:
        """What `DecodeInputs` has a source for in a step that only decodes."""
        device = inputs.sections
        columns = {name: device[section] for name, section in _DECODE_COLUMNS.items()}
        return {name: values for name, values in columns.items() if len(values)}

    def tokens(self, plan: StepPlan, inputs: Inputs) -> StepTokens:
        """What the model is given in a step of any shape."""
        device = inputs.sections
        states = ("q_start", "snap_start", "snap_ends", "snap_slots")
        return StepTokens(
            input_ids=self._input_ids(plan, device),
            states=StateBatch(slots=device["state_slots"], **{name: device[name] for name in states}),
            **{name: device[name] for name in _TOKENS},
        )

    def extend_columns(self, plan: StepPlan, inputs: Inputs) -> dict[str, Tensor]:
        """What `ExtendInputs` has a source for."""
        device = inputs.sections
        columns = {name: device[section] for name, section in _COLUMNS.items()}
        columns |= {"input_ids": self._input_ids(plan, device), "q_ends": device["q_start"][1:]}
        return {name: values for name, values in columns.items() if len(values)}

    def _input_ids(self, plan: StepPlan, device: Mapping[str, Tensor]) -> Tensor:
        ids = device["input_ids"]
        if plan.num_decodes:
            ids[len(plan.input_ids) :].copy_(self._rows.last_tokens.index_select(0, device["decode_rows"]))
        return ids


def _counts(plan: StepPlan, n: int, num_drawing: int, num_reporting: int, num_targets: int) -> tuple[int, ...]:
    """How long the sections are, in their order."""
    s, t, w, a = plan.num_seqs, plan.num_tokens, len(plan.writes.write_rows), len(plan.admissions)
    m, k, b = len(plan.windows.map_pages), len(plan.states.snap_slots), len(plan.states.copy_src)
    states = len(plan.states.state_slots)
    return (
        *(s, s + 1, s),
        *(t, t, t),
        plan.num_decodes,
        *(n, n),
        n if plan.num_extends else 0,
        n,
        num_drawing,
        num_reporting,
        *(w, w, w),
        num_targets,
        len(plan.windows.out_window_loc),
        *(m, m),
        *(states, states + 1 if states else 0),
        *(k, k),
        states if plan.num_extends == 0 else 0,
        len(plan.states.clears),
        *(b, b),
        sum(_sizes(plan)) if plan.host.saves or plan.host.loads else 0,
        a,
        *[a] * len(SAMPLING_COLUMNS),
    )


def _sizes(plan: StepPlan) -> list[int]:
    """The lengths of the parts of the section `kept`, three for each save and load."""
    return [
        size
        for kept in (*plan.host.saves, *plan.host.loads)
        for size in (len(kept.pages), len(kept.window_pages), int(kept.state_slot != PAD))
    ]


def _places(plan: StepPlan, kept: Tensor) -> list[Places]:
    parts = torch.split(kept, _sizes(plan))
    return [parts[i : i + 3] for i in range(0, len(parts), 3)]


def _write_changes(plan: StepPlan, host: dict[str, Array]) -> None:
    """What happens before the model runs: in most steps little of it."""
    if len(plan.writes.write_rows):
        host["write_rows"][:] = plan.writes.write_rows
        host["write_columns"][:] = plan.writes.write_columns
        host["write_pages"][:] = plan.writes.write_pages
    if plan.admissions:
        _write_admissions(plan.admissions, host)
    if len(plan.windows.map_pages):
        host["map_pages"][:] = plan.windows.map_pages
        host["map_windows"][:] = plan.windows.map_windows
    if len(plan.states.clears):
        host["clears"][:] = plan.states.clears
    if len(plan.states.copy_src):
        host["copy_src"][:] = plan.states.copy_src
        host["copy_dst"][:] = plan.states.copy_dst
    at = 0
    for kept in (*plan.host.saves, *plan.host.loads):
        slots = (kept.state_slot,) if kept.state_slot != PAD else ()
        for ids in (kept.pages, kept.window_pages, slots):
            host["kept"][at : at + len(ids)] = ids
            at += len(ids)


def _write_states(plan: StepPlan, host: dict[str, Array]) -> None:
    host["state_slots"][:] = plan.states.state_slots
    if plan.num_extends == 0:
        tracked = host["mamba_track_indices"]
        tracked[:] = PAD
        tracked[plan.states.snap_seqs] = plan.states.snap_slots
    start = host["snap_start"]
    start[:] = 0
    if len(plan.states.snap_slots):
        np.cumsum(np.bincount(plan.states.snap_seqs, minlength=plan.num_seqs), out=start[1:])
        ends = host["q_start"][1:][plan.states.snap_seqs]
        host["snap_ends"][:] = ends - (plan.seq_lens[plan.states.snap_seqs] - plan.states.snap_lens)
        host["snap_slots"][:] = plan.states.snap_slots


def _write_sequences(plan: StepPlan, host: dict[str, Array]) -> None:
    host["rows"][:] = plan.rows
    host["seq_lens"][:] = plan.seq_lens
    host["out_cache_loc"][:] = plan.out_cache_loc
    host["decode_rows"][:] = plan.rows[plan.num_extends :]
    q_start = host["q_start"]
    if plan.num_extends == 0:
        q_start[:] = np.arange(len(q_start))
        np.subtract(plan.seq_lens, 1, out=host["positions"])
        host["sample_tokens"][:] = q_start[:-1]
        host["sample_lens"][:] = plan.seq_lens
        return
    q_start[0] = 0
    np.cumsum(plan.q_lens, out=q_start[1:])
    ends = q_start[1:].astype(np.int64)
    np.add(np.arange(plan.num_tokens), np.repeat(plan.seq_lens - ends, plan.q_lens), out=host["positions"])
    host["input_ids"][: len(plan.input_ids)] = plan.input_ids
    np.subtract(ends[plan.sample_mask], 1, out=host["sample_tokens"])
    host["sample_lens"][:] = plan.seq_lens[plan.sample_mask]
    host["sample_seqs"][:] = np.flatnonzero(plan.sample_mask)


def _write_admissions(admissions: tuple[Admission, ...], host: dict[str, Array]) -> None:
    host["admit_rows"][:] = [admission.row for admission in admissions]
    for name in SAMPLING_COLUMNS:
        host[name][:] = [getattr(admission.params, name) for admission in admissions]
