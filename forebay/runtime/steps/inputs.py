"""A step's plan on its way to the device.

Shape letters: S sequences, T tokens, G draft tokens, A admissions, B of them prebuilt. N positions are sampled from, D
of them with a random draw (not greedy), L of them with log-probabilities. X are the prompt positions with
log-probabilities, H the pages and slots that are saved to the host or loaded from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from forebay.memory.slots import NO_IDS, PAD, Ids, inside
from forebay.pools.mover import Mover, Places
from forebay.pools.request_rows import SamplingRows
from forebay.requests.step_plan import NO_HOST_WORK, Admission, HostCopy, HostWork, StepPlan, TierCopy
from forebay.runtime.host.host_copies import HostCopies
from forebay.runtime.host.packing import Array, Packing, Sections
from forebay.runtime.host.plan_columns import ON_DEVICE, arrays_of, dtype_of
from forebay.runtime.host.shape import Shape
from forebay.runtime.host.tier_stores import TierStore, TierStores
from forebay.runtime.kinds.build import DERIVED
from forebay.runtime.sampling.row_options import Sampling
from forebay.runtime.steps.extend import UNSET
from forebay.runtime.steps.forward import Forward
from forebay.runtime.steps.proposer import DRAFTING, DeviceProposer

# What the device is told besides the plan's own columns.
_DERIVED: Final = {
    "q_start": torch.int32,  # [S + 1], but of a step of decodes of one token
    "sample_tokens": torch.int64,  # [N], which of the T; of a step of any shape
    "encoded_rows": torch.int32,  # [T]; of a step with pictures
    "ahead": torch.int32,  # [T]; of a step with spans
    "rope_positions": torch.int64,  # [T * 3], UNSET of decodes; of a step with pictures, with M-RoPE
    "sample_rows": torch.int32,  # [N]
    "sample_seqs": torch.int64,  # [N], which of the S; of a step of any shape
    "drawing": torch.int64,  # [D], which of the N
    "reporting": torch.int64,  # [L], which of the N
    "targets": torch.int64,  # [X]: the token whose log-probability is wanted
    "draft_rows": torch.int64,  # [G]
    "draft_columns": torch.int64,  # [G]
    "copied": torch.int64,  # [H]: of each save, load, store and fetch what it has of each kind of cache
    "admit_rows": torch.int64,  # [A]
    "admit_adapters": torch.int64,  # [A]: slots
    "admit_rope_deltas": torch.int64,  # [A]
    "built_rows": torch.int64,  # [B]
    "built_lens": torch.int64,  # [B]: tokens with KV
    "built_tokens": torch.int64,  # [B]: the one behind them
    **{
        name: torch.float64 if column.dtype.is_floating_point else torch.int64
        for name, column in SamplingRows.declared.items()
    },  # [A] each
}
_SECTIONS: Final = {name: dtype_of(column) for name, column in ON_DEVICE.items()} | _DERIVED | DERIVED | DRAFTING


NO_TIERS: Final[Mapping[str, TierStore]] = {}
_BUILT: Final = {"kv_lens": "built_lens", "last_tokens": "built_tokens"}


# A step of as many sequences as tokens has at most this much for each; whatever needs more makes the buffer grow.
_WORDS_PER_TOKEN: Final = sum(-(-dtype.itemsize // 8) for dtype in _SECTIONS.values())


class StepInputs:
    """Carries plans to the device in one copy each, and does there what a plan does before the model runs."""

    def __init__(
        self,
        forward: Forward,
        mover: Mover,
        *,
        max_num_tokens: int,
        proposer: DeviceProposer | None = None,
        tiers: Mapping[str, TierStore] = NO_TIERS,
    ) -> None:
        self._rows, self._kinds, self._proposer = forward.rows, forward.kinds, proposer
        self.copies, self.tiers = HostCopies(mover), TierStores(mover, tiers)
        self._packing = Packing(_SECTIONS, self._rows.last_tokens.device, num_words=_WORDS_PER_TOKEN * max_num_tokens)

    def stage(self, plan: StepPlan, shape: Shape, sampling: Sampling, targets: Ids) -> Sections:
        """Send `plan`, and what its sequences want; `targets` are the tokens after each position of the extends in
        `plan.prompt_logprobs`."""
        arrays = dict(zip(ON_DEVICE, arrays_of(plan), strict=True))
        arrays |= {"sample_rows": sampling.rows, "drawing": sampling.drawing, "reporting": sampling.reporting}
        arrays["targets"] = targets
        arrays |= self._derived(plan, shape)
        if self._proposer is not None:
            arrays |= self._proposer.arrays(plan)
        if plan.admissions:
            arrays |= _of_admissions(plan.admissions)
            if self._rows.rope_delta is not None:
                arrays["admit_rope_deltas"] = np.array([admission.rope_delta for admission in plan.admissions])
        if plan.host is NO_HOST_WORK:
            sections = self._packing.send(arrays)
            self._change(plan, sections)
        else:
            sections = self._change_between_copies(plan, arrays)
        return sections

    def check(self, plan: StepPlan) -> None:
        """Raise NoHostCopy or KeyError for host work on a copy or a tier that does not exist."""
        self.copies.check(plan)
        self.tiers.check(plan)

    def _change_between_copies(self, plan: StepPlan, arrays: dict[str, Array]) -> Sections:
        """Send the step's inputs and do its work before the model: copies to the host come first, those from the host
        last."""
        host, copies = plan.host, plan.host.copies
        if copies:
            arrays["copied"] = np.concatenate([ids for copy in copies for ids in copy.slots.values()])
        sections = self._packing.send(arrays)
        places = _places(copies, sections["copied"]) if copies else []
        by_copy = dict(zip(map(id, copies), places, strict=True))
        self._copy_away(host, by_copy)
        self._change(plan, sections)
        for copy in host.loads:
            self.copies.load(copy.request_id, by_copy[id(copy)])
        for fetched in host.fetches:
            self.tiers.fetch(fetched, by_copy[id(fetched)])
        return sections

    def _change(self, plan: StepPlan, sections: Sections) -> None:
        """Do all that comes before the model but copies, in the order that `StepPlan` says."""
        if "write_rows" in sections:
            at = sections["write_rows"], sections["write_columns"]
            self._rows.req_to_token.index_put_(at, sections["write_pages"])
        if plan.admissions:
            self._admit(sections)
        if "built_rows" in sections:
            for name in ("kv_lens", "last_tokens"):
                self._rows[name].index_copy_(0, sections["built_rows"], sections[_BUILT[name]])
        if plan.num_extends:
            extended = sections["req_pool_indices"][: plan.num_extends].long()
            self._rows.kv_lens.index_copy_(0, extended, sections["starts"])
        if "drafts" in sections:
            at = sections["draft_rows"], sections["draft_columns"]
            self._rows.draft_tokens.index_put_(at, sections["drafts"])
        for kind in self._kinds:
            kind.change(sections)

    def _copy_away(self, host: HostWork, places: Mapping[int, Places]) -> None:
        """Copy slots to host memory and to tiers, before anything overwrites them."""
        for copy in host.saves:
            self.copies.save(copy.request_id, places[id(copy)])
        for stored in host.stores:
            self.tiers.store(stored, places[id(stored)])
        for request_id in host.drops:
            self.copies.drop(request_id)

    def _admit(self, sections: Sections) -> None:
        """Write the parameters of the requests that the plan admits to their rows."""
        rows = sections["admit_rows"]
        for name in SamplingRows.declared:
            column = self._rows[name]
            column.index_copy_(0, rows, sections[name].to(column.dtype))
        if self._rows.adapter is not None:
            self._rows.adapter.index_copy_(0, rows, sections["admit_adapters"].int())
        if self._rows.rope_delta is not None:
            self._rows.rope_delta.index_copy_(0, rows, sections["admit_rope_deltas"])

    def _derived(self, plan: StepPlan, shape: Shape) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        if shape is not Shape.DECODES:
            arrays["q_start"] = np.concatenate([[0], np.cumsum(plan.q_lens)])
        if shape is Shape.DRAFTS and len(plan.drafts):
            counts = plan.q_lens - 1
            arrays |= {"draft_rows": np.repeat(plan.rows, counts), "draft_columns": inside(counts)}
        if shape is Shape.TOKENS:
            arrays["sample_tokens"] = arrays["q_start"][1:][plan.sample_mask] - 1
            arrays["sample_seqs"] = np.flatnonzero(plan.sample_mask)
        if len(plan.pictures.picture_tokens):
            arrays["encoded_rows"] = np.full(plan.num_tokens, PAD)
            arrays["encoded_rows"][plan.pictures.picture_tokens] = plan.pictures.picture_rows
        if len(plan.pictures.span_starts):
            arrays["ahead"] = _ahead(plan)
        if len(given := plan.pictures.rope_positions):
            of_tokens = np.full((plan.num_tokens, 3), UNSET)
            of_tokens[: len(plan.input_ids)] = given.reshape(3, -1).T
            arrays["rope_positions"] = of_tokens.reshape(-1)
        for kind in self._kinds:
            arrays |= kind.arrays(plan, shape, arrays.get("q_start", NO_IDS))
        return arrays


def _ahead(plan: StepPlan) -> Array:
    """Return for each token the number of later tokens in its span [T]."""
    ahead = np.zeros(plan.num_tokens, dtype=np.int64)
    for start, length in zip(plan.pictures.span_starts.tolist(), plan.pictures.span_lens.tolist(), strict=True):
        ahead[start : start + length] = np.arange(length - 1, -1, -1)
    return ahead


def _of_admissions(admissions: Sequence[Admission]) -> dict[str, Array]:
    built = [admission for admission in admissions if admission.prebuilt]
    arrays = {"admit_rows": np.array([admission.row for admission in admissions])} | {
        name: np.array([getattr(admission.params, name) for admission in admissions]) for name in SamplingRows.declared
    }
    arrays["admit_adapters"] = np.array([admission.adapter for admission in admissions])
    if built:
        arrays["built_rows"] = np.array([admission.row for admission in built])
        arrays["built_lens"] = np.array([admission.kv_len for admission in built])
        arrays["built_tokens"] = np.array([admission.token_ids[-1] for admission in built], dtype=np.int64)
    return arrays


def _places(copies: Sequence[HostCopy | TierCopy], ids: Tensor) -> list[Places]:
    parts = iter(torch.split(ids, [len(part) for copy in copies for part in copy.slots.values()]))
    return [{kind: next(parts) for kind in copy.slots} for copy in copies]
