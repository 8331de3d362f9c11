"""Tokens drafted by a head (MTP, NextN, EAGLE) on the model's device; the host never sees them.

Behind each step the head runs over the step's tokens, each beside the token that follows it, at the same places: so its
KV is more layers of the same pages. It leaves one hidden state for each row, of the last token that stays. If the next
step has drafts, it begins from that state: the head drafts a token, continues from it, and so on. This happens in the
step that verifies and not at the end of the one before, because a row's pages reach as far as that step.

Drafts, and the values that the head keeps, can lower acceptance and change no token.

Shape letters: B rows that draft, T tokens, S sequences, H numbers of a token that the head gives, F entries of its
input, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.memory.slots import PAD
from forebay.models.drafter import Drafter
from forebay.ops import Ops
from forebay.ops.reference.attention import KvCache
from forebay.pools.cache_pool import CachePool
from forebay.pools.table import Column, Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner, default_sizes
from forebay.runtime.host.packing import Array, Sections
from forebay.runtime.steps.extend import GridTokens, Tokens, token_counts
from forebay.runtime.steps.forward import Batch, Forward, StepTokens
from forebay.runtime.steps.ragged import RAGGED, RaggedInputs, from_zero


class Drafted(NamedTuple):
    token_ids: Tensor  # [B] int64, the last ones


class Followed(NamedTuple):
    hidden: Tensor  # [T, H]


class DraftInputs(Table):
    """A padded row drafts nothing."""

    drafting_rows = Column(torch.int32, pad=PAD)
    num_drafts = Column(torch.int32, pad=0)


class Head:
    """A draft head over the pools, and by request row the values from which it continues: `hidden`, and the number of
    tokens with KV before the next step (`starts`) and before a drafted token (`lens`)."""

    def __init__(self, forward: Forward, drafter: Drafter, vocab_size: int) -> None:
        self.forward, self.ops, self.rows = forward, forward.ops, forward.rows
        self.drafter = drafter
        self.vocab_size = vocab_size
        device = forward.rows.kv_lens.device
        columns = {
            "hidden": Column(drafter.dtype, (drafter.hidden_size,), pad=0),
            "starts": Column(torch.int64, pad=0),
            "lens": Column(torch.int64, pad=0),
        }
        self.kept = Table(forward.rows.num_rows, columns=columns, device=device, take=forward.rows.take)
        self.counts = torch.arange(forward.rows.num_rows + 1, dtype=torch.int32, device=device)
        self.layers = last_layers(forward.cache, drafter.num_layers)

    def begin(self, rows: Tensor, column: str) -> None:
        """`column` becomes the length that these rows [S] have now."""
        self.ops.steps.scatter(self.kept[column], rows, self.ops.steps.gather(self.rows.kv_lens, rows))

    def context(
        self, batch: Batch, lens: Tensor, next_ids: Tensor, rope_positions: Tensor | None = None
    ) -> ForwardContext:
        """Return the context of the tokens behind the `lens` [R] tokens of their rows, where next_ids [T] come behind
        each. `rope_positions` as of `StepTokens`."""
        placed = self.ops.steps.place_tokens(*batch, lens, self.forward.pages, len(next_ids))
        tokens = StepTokens(input_ids=next_ids, batch=batch, placed=placed, rope_positions=rope_positions)
        return self.forward.context(tokens)


def last_layers(cache: CachePool, count: int) -> list[tuple[str, KvCache]]:
    """Return the KV of the last `count` layers, each with its kind of cache."""
    num_layers = len(cache.specs)
    return [(cache.specs[layer].kind, cache.kv(layer)) for layer in range(num_layers - count, num_layers)]


def clear_not_finite(ops: Ops, layers: Sequence[tuple[str, KvCache]], ctx: ForwardContext, computed: Tensor) -> None:
    """Zero the KV that a drafter wrote for tokens whose `computed` [T, H] is not finite. The prefix cache adopts it
    unseen if the model's own is finite, and drafts behind it would never be accepted (C30, decision 14)."""
    finite = ops.sampling.finite_rows(computed)
    for kind, layer in layers:
        for table in layer:
            if table is not None:
                ops.drafting.clear_rows(table, ctx.pages(kind).out_cache_loc, finite)


class DraftStep:
    """Drafts up to `most` tokens of each row, the most likely ones, into `draft_tokens`. From each but the last the
    head continues, at the place at which the step that follows writes its own KV."""

    def __init__(self, head: Head, *, most: int) -> None:
        self.head, self._most = head, most

    def __call__(self, inputs: DraftInputs) -> Drafted:
        head, ops, counts = self.head, self.head.ops, inputs.num_drafts
        rows, lens = inputs.drafting_rows, head.kept["lens"]
        head.begin(rows, "lens")
        hidden = ops.drafting.gather_rows(head.kept["hidden"], rows)
        for column in range(self._most):
            token_ids = head.drafter.token_ids(hidden)
            rows = ops.drafting.keep_drafts(token_ids, rows, counts, column, head.rows.draft_tokens)
            if column + 1 < self._most:
                batch = Batch(rows, head.counts[: inputs.num_rows + 1])
                hidden = head.drafter.draft(head.context(batch, lens, token_ids), token_ids, hidden)
                ops.steps.advance(lens, *batch)
        return Drafted(token_ids)


class FollowInputs(RaggedInputs):
    def __init__(self, tokens: Table, sequences: FollowedSequences) -> None:
        super().__init__(tokens, sequences)
        self.sequences = sequences


class FollowedSequences(Table):
    declared = RAGGED

    def __init__(self, num_rows: int, *, device: torch.device | str) -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0})
        self.q_start = from_zero(self, "q_ends")


class FollowStep:
    """Runs the head over all tokens of a step, each beside the one behind it, once it is known which of them stay."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def __call__(self, inputs: FollowInputs) -> Followed:
        head, ops = self.head, self.head.ops
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        starts, seen = head.kept["starts"], inputs["seen"]
        positions = ops.steps.place_tokens(*batch, starts, head.forward.pages, len(seen)).positions
        next_ids, ends = ops.drafting.follow(
            inputs["input_ids"], positions, *batch, head.forward.known, head.vocab_size
        )
        given = inputs["rope_positions"] if head.rows.rope_delta is not None else None
        ctx = head.context(batch, starts, next_ids, given)
        followed = head.drafter.follow(ctx, next_ids, seen)
        clear_not_finite(ops, head.layers, ctx, followed)
        ops.drafting.scatter_rows(head.kept["hidden"], batch.rows, ops.drafting.gather_rows(followed, ends))
        head.begin(batch.rows, "starts")
        return Followed(followed)


class DraftHead:
    """A `DeviceProposer`."""

    def __init__(
        self,
        forward: Forward,
        *,
        drafter: Drafter,
        vocab_size: int,
        max_num_tokens: int,
        sizes: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        self.head = Head(forward, drafter, vocab_size)
        self._prompts: dict[int, npt.NDArray[np.int32]] = {}  # by row: what was known of its request at first
        most = forward.rows.draft_tokens.shape[1]
        self.drafts = [self._drafts(num, sizes, backend) for num in range(1, most + 1)]
        self.follow = self._follow(max_num_tokens, sizes, backend)

    def _drafts(self, most: int, sizes: Sequence[int], backend: GraphBackend) -> GraphRunner[DraftInputs, Drafted]:
        head = self.head
        writes = [(head.rows, "draft_tokens"), (head.kept, "hidden"), (head.kept, "lens")]
        inputs = DraftInputs(head.rows.num_rows, device=head.counts.device)
        return GraphRunner(DraftStep(head, most=most), inputs, writes=writes, sizes=sizes, backend=backend)

    def _follow(
        self, max_num_tokens: int, sizes: Sequence[int], backend: GraphBackend
    ) -> GraphRunner[FollowInputs, Followed]:
        head, device = self.head, self.head.counts.device
        columns = {**Tokens.declared, "seen": Column(head.forward.model.dtype, (head.drafter.seen_size,), pad=0)}
        if head.rows.rope_delta is not None:
            columns["rope_positions"] = GridTokens.declared["rope_positions"]
        tokens = Table(max_num_tokens, columns=columns, device=device)
        inputs = FollowInputs(tokens, FollowedSequences(head.rows.num_rows, device=device))
        # A padded sequence must not be longer than a row of the page table.
        most = min(max_num_tokens, head.rows.req_to_token.shape[1] * head.forward.cache.page_size)
        quickly = backend.captures_quickly
        of_decodes = default_sizes(max(sizes) * (1 + head.rows.draft_tokens.shape[1]), quickly=quickly)
        captured = {*of_decodes, *(token_counts(most, quickly=quickly) if backend.captures_prompts else ())}
        writes = [(head.kept, "hidden"), (head.kept, "starts")]
        within = sorted(size for size in captured if size <= most)
        return GraphRunner(FollowStep(head), inputs, writes=writes, sizes=within, backend=backend)

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        self._prompts.update((admission.row, admission.token_ids) for admission in plan.admissions)
        arrays: dict[str, Array] = {}
        going_on = np.flatnonzero(~plan.sample_mask[: plan.num_extends])
        if len(going_on):
            arrays["chunk_rows"] = rows = plan.rows[going_on]
            ends = plan.ends[going_on]
            # Behind one that is pooled nothing comes: what its row is given there is read by nobody.
            following = [
                self._prompts[row][end : end + 1] for row, end in zip(rows.tolist(), ends.tolist(), strict=True)
            ]
            arrays["chunk_next"] = np.array([int(token[0]) if len(token) else PAD for token in following])
        if plan.width > 1:
            wide = plan.q_lens > 1
            arrays |= {"drafting_rows": plan.rows[wide], "num_drafts": plan.q_lens[wide] - 1}
        return arrays

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        if plan.width > 1:
            columns = inputs.of(DraftInputs.declared)
            self.drafts[plan.width - 2].run(columns, len(columns["drafting_rows"]))

    def after(self, plan: StepPlan, inputs: Sections, input_ids: Tensor, seen: Tensor) -> None:
        head, rows = self.head, inputs["req_pool_indices"]
        if plan.num_extends:
            head.kept["starts"].index_copy_(0, rows[: plan.num_extends].long(), inputs["starts"])
        if "built_rows" in inputs:
            head.kept["starts"].index_copy_(0, inputs["built_rows"], inputs["built_lens"])
        if "chunk_rows" in inputs:
            head.ops.steps.scatter(head.rows.last_tokens, inputs["chunk_rows"], inputs["chunk_next"])
        bounds = inputs["q_start"] if "q_start" in inputs else head.counts[: len(rows) + 1]
        if not self.follow.captured(len(seen)):
            input_ids, seen = input_ids.clone(), seen.clone()
        columns = {"input_ids": input_ids, "seen": seen, "req_pool_indices": rows, "q_ends": bounds[1:]}
        if "rope_positions" in inputs:
            columns["rope_positions"] = inputs["rope_positions"].view(-1, 3)
        self.follow.run(columns, len(seen))

    def capture_next(self) -> bool:
        return self.follow.capture_next() or any(runner.capture_next() for runner in self.drafts)

    def drop_graphs(self) -> None:
        self.follow.drop_graphs()
        for runner in self.drafts:
            runner.drop_graphs()

    def reset_padding(self) -> None:
        self.head.kept.reset_padding()
