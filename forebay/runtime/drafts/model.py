"""Tokens drafted by a smaller model on the model's device; the host never sees them.

Its layers follow the model's own, in the same pages, and a token has the same place in both. Before a step the draft
model runs over the tokens that the step decodes, and if drafts behind them are verified, it continues from each draft
to the next. Behind a step it runs over the prompts in it.

The last draft has no KV of the draft model when it is accepted. So a draft begins with the last two tokens of its row,
and only the last of a row's tokens can lack its KV.

Drafts, and the values that the draft model keeps, can lower acceptance and change no token.

Shape letters: D rows that decode, T tokens, S sequences, H hidden size of the draft model, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.models.network import Network
from forebay.ops.reference.accept import Known
from forebay.pools.table import Column, Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.drafts.head import DraftInputs, FollowedSequences, FollowInputs, clear_not_finite, last_layers
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.packing import Array, Sections
from forebay.runtime.steps.extend import Tokens, token_counts
from forebay.runtime.steps.forward import Batch, Forward, StepTokens


class Ran(NamedTuple):
    hidden: Tensor  # [D, H] or [T, H], of the tokens that it ran over last


class DraftingModel:
    """The draft model over the pools, and by request row the last token that has KV in the model, `before_last`; `lens`
    are the tokens before those that it is about to compute."""

    def __init__(self, forward: Forward, model: Network, vocab_size: int) -> None:
        self.forward, self.ops, self.rows, self.model = forward, forward.ops, forward.rows, model
        self.vocab_size = vocab_size
        device = self.rows.kv_lens.device
        columns = {name: Column(torch.int64, pad=0) for name in ("before_last", "lens")}
        self.kept = Table(self.rows.num_rows, columns=columns, device=device, take=self.rows.take)
        # As if the last token were a draft behind the one before it.
        self.last_two = Known(self.kept["lens"], self.kept["before_last"], self.rows.last_tokens.unsqueeze(1))
        self.counts = torch.arange(self.rows.num_rows + 1, dtype=torch.int32, device=device)
        self._layers = last_layers(forward.cache, len(model.cache_specs()))

    def hidden(self, batch: Batch, input_ids: Tensor) -> Tensor:
        """Return the hidden states [T, H] of input_ids [T], behind the `lens` tokens of their rows. Writes KV."""
        placed = self.ops.steps.place_tokens(*batch, self.kept["lens"], self.forward.pages, len(input_ids))
        tokens = StepTokens(input_ids=input_ids, batch=batch, placed=placed)
        ctx = self.forward.context(tokens)
        hidden = self.model.forward(ctx, input_ids)
        clear_not_finite(self.ops, self._layers, ctx, hidden)
        return hidden


class DraftStep:
    """Runs over the last two tokens of each row, and drafts up to `most` behind them, the most likely ones, into
    `draft_tokens`. Of the last draft there is no KV."""

    def __init__(self, drafting: DraftingModel, *, most: int) -> None:
        self._drafting, self._most = drafting, most
        self._begins = 2 * drafting.counts
        self._seconds = self._begins[:-1] + 1

    def __call__(self, inputs: DraftInputs) -> Ran:
        drafting, ops, n = self._drafting, self._drafting.ops, inputs.num_rows
        rows, lens = inputs.drafting_rows, drafting.kept["lens"]
        batch = Batch(rows, self._begins[: n + 1])
        input_ids = ops.steps.decode_ids(*batch, drafting.last_two, 2 * n, drafting.vocab_size)
        hidden = ops.drafting.gather_rows(drafting.hidden(batch, input_ids), self._seconds[:n])
        for column in range(self._most):
            ops.steps.advance(lens, *batch)
            token_ids = ops.sampling.argmax_rows(drafting.model.logits(hidden))[0]
            rows = ops.drafting.keep_drafts(token_ids, rows, inputs.num_drafts, column, drafting.rows.draft_tokens)
            if column + 1 < self._most:
                batch = Batch(rows, drafting.counts[: n + 1])
                hidden = drafting.hidden(batch, token_ids)
        return Ran(hidden)


class PromptStep:
    """Runs over tokens of prompts, for the sake of their KV."""

    def __init__(self, drafting: DraftingModel) -> None:
        self._drafting = drafting

    def __call__(self, inputs: FollowInputs) -> Ran:
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        return Ran(self._drafting.hidden(batch, inputs["input_ids"]))


class DraftModel:
    """A `DeviceProposer`."""

    def __init__(
        self,
        forward: Forward,
        *,
        model: Network,
        vocab_size: int,
        max_num_tokens: int,
        sizes: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        self.drafting = DraftingModel(forward, model, vocab_size)
        self._lens = torch.empty(0, dtype=torch.int64)  # of the rows that decode, before the step
        most = forward.rows.draft_tokens.shape[1]
        self.drafts = [self._drafts(num, sizes, backend) for num in range(most + 1)]
        self.prompts = self._prompts(max_num_tokens, sizes, backend)

    def _drafts(self, most: int, sizes: Sequence[int], backend: GraphBackend) -> GraphRunner[DraftInputs, Ran]:
        drafting = self.drafting
        writes = [(drafting.rows, "draft_tokens"), (drafting.kept, "lens")]
        inputs = DraftInputs(drafting.rows.num_rows, device=drafting.counts.device)
        return GraphRunner(DraftStep(drafting, most=most), inputs, writes=writes, sizes=sizes, backend=backend)

    def _prompts(
        self, max_num_tokens: int, sizes: Sequence[int], backend: GraphBackend
    ) -> GraphRunner[FollowInputs, Ran]:
        drafting, device = self.drafting, self.drafting.counts.device
        sequences = FollowedSequences(drafting.rows.num_rows, device=device)
        inputs = FollowInputs(Tokens(max_num_tokens, device=device), sequences)
        # A padded sequence must not be longer than a row of the page table.
        most = min(max_num_tokens, drafting.rows.req_to_token.shape[1] * drafting.forward.cache.page_size)
        quickly = backend.captures_quickly
        captured = token_counts(most, quickly=quickly) if backend.captures_prompts else [1]  # others run as they are
        return GraphRunner(PromptStep(drafting), inputs, writes=[], sizes=captured, backend=backend)

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        built = [admission.token_ids[-2] for admission in plan.admissions if admission.prebuilt]
        arrays: dict[str, Array] = {"built_before": np.array(built, dtype=np.int64)} if built else {}
        return arrays | ({"num_drafts": plan.q_lens - 1} if plan.width > 1 else {})

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        if "built_before" in inputs:
            self.drafting.kept["before_last"].index_copy_(0, inputs["built_rows"], inputs["built_before"])
        rows = inputs["req_pool_indices"][plan.num_extends :]
        if plan.num_decodes:
            self._lens = self.drafting.ops.steps.gather(self.drafting.rows.kv_lens, rows)
            self.drafting.ops.steps.scatter(self.drafting.kept["lens"], rows, self._lens - 1)
            columns = {"drafting_rows": rows, **inputs.of(["num_drafts"])}
            self.drafts[plan.width - 1].run(columns, plan.num_decodes)

    def after(self, plan: StepPlan, inputs: Sections, input_ids: Tensor, seen: Tensor) -> None:
        if not plan.num_seqs:
            return
        ops, kept, rows = self.drafting.ops, self.drafting.kept, inputs["req_pool_indices"]
        bounds = inputs["q_start"] if "q_start" in inputs else self.drafting.counts[: plan.num_seqs + 1]
        num_stay = bounds.diff().long()
        if plan.width > 1:
            num_stay = ops.steps.gather(self.drafting.rows.kv_lens, rows) - self._lens
        last = (bounds[:-1] + num_stay - 1).clamp(min=0)  # the padding row may have come from any length
        ops.steps.scatter(kept["before_last"], rows, input_ids.index_select(0, last))
        if num := plan.num_extends:
            ops.steps.scatter(kept["lens"], rows[:num], inputs["starts"])
            known = inputs["input_ids"]
            columns = {"input_ids": known, "req_pool_indices": rows[:num], "q_ends": bounds[1 : num + 1]}
            self.prompts.run(columns, len(known))

    def capture_next(self) -> bool:
        return any(runner.capture_next() for runner in reversed(self.drafts)) or self.prompts.capture_next()

    def drop_graphs(self) -> None:
        self.prompts.drop_graphs()
        for runner in self.drafts:
            runner.drop_graphs()

    def reset_padding(self) -> None:
        self.drafting.kept.reset_padding()
