"""Tokens drafted by an assistant over the model's KV: where the model computes, and never seen by the host.

Before a step that verifies, the assistant reads the embedding of each row's last token and the hidden state that this
token was chosen from. It continues from its own outputs, at one position, over KV that does not grow, so all of a draft
is one captured step. Of the verifying step only the hidden state of the last accepted token is kept.

A wrong draft, or a wrong hidden state, reduces acceptance and never changes a token.

Shape letters: B rows that draft, padding included, R request rows, G most drafts of a row, S sequences, T tokens, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.memory.slots import PAD
from forebay.models.assistant import Assistant
from forebay.models.decoder import Model
from forebay.pools.table import Column, Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.packing import Array, Sections
from forebay.runtime.steps.forward import Batch, Forward, StepTokens

_HIDDEN: Final = "hidden"


class DraftedTokens(NamedTuple):
    token_ids: Tensor  # [B, drafts] int64, and in `draft_tokens` already


class DraftInputs(Table):
    """The rows that draft; a padded one is row 0, of which an assistant sees page 0."""

    drafting_rows = Column(torch.int32, pad=PAD)


class FrozenStep:
    """Drafts `count` tokens of each row: the first from the row's kept values, each other from the one before."""

    def __init__(self, forward: Forward, assistant: Assistant, kept: Table, *, count: int) -> None:
        self._forward, self._assistant, self._kept, self._count = forward, assistant, kept, count
        device = forward.rows.kv_lens.device
        self._counts = torch.arange(forward.rows.num_rows + 1, dtype=torch.int32, device=device)

    def __call__(self, inputs: DraftInputs) -> DraftedTokens:
        forward, assistant, rows = self._forward, self._assistant, inputs.drafting_rows
        assert isinstance(forward.model, Model), "an assistant drafts for a decoder"
        batch = Batch(rows, self._counts[: inputs.num_rows + 1])
        placed = forward.place(batch, inputs.num_rows)
        # Of the last token there is no KV yet; of the padding row there is none at all.
        placed = placed._replace(seq_lens=(placed.seq_lens - 1).clamp(min=1))
        token_ids = forward.ops.steps.gather(forward.rows.last_tokens, rows)
        tokens = StepTokens(input_ids=token_ids, batch=batch, placed=placed)
        ctx, hidden = forward.context(tokens), self._kept[_HIDDEN].index_select(0, rows)
        x = assistant.forward(ctx, forward.model.embed(token_ids), hidden)
        drafted = [assistant.token_ids(ctx, x)]
        while len(drafted) < self._count:
            x = assistant.forward(ctx, forward.model.embed(drafted[-1]), assistant.hidden(ctx, x))
            drafted.append(assistant.token_ids(ctx, x))
        together = torch.stack(drafted, dim=1)
        forward.rows.draft_tokens[:, : self._count].index_copy_(0, rows.long(), together)
        return DraftedTokens(together)


class FrozenDraft:
    """A `DeviceProposer`: drafts before steps that verify, and keeps the values for the next draft behind every step.
    Rows of such a step without drafts are drafted for as well, and the result is unused."""

    def __init__(self, forward: Forward, assistant: Assistant, *, sizes: Sequence[int], backend: GraphBackend) -> None:
        rows = self._rows = forward.rows
        self._ops = forward.ops
        device = rows.kv_lens.device
        columns = {_HIDDEN: Column(assistant.dtype, (assistant.backbone_size,), pad=0)}
        self.kept = Table(rows.num_rows, columns=columns, device=device, take=rows.take)
        self._lens = torch.empty(0, dtype=torch.int64, device=device)  # of the step's rows, before it
        self._counts = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=device)
        self.runners = [
            GraphRunner(
                FrozenStep(forward, assistant, self.kept, count=count),
                DraftInputs(max(rows.num_rows, *sizes), device=device),
                writes=[(rows, "draft_tokens")],
                sizes=sizes,
                backend=backend,
            )
            for count in range(1, rows.draft_tokens.shape[1] + 1)
        ]

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        return {}

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        if plan.width > 1:
            rows = inputs["req_pool_indices"]
            self._lens = self._ops.steps.gather(self._rows.kv_lens, rows)
            self.runners[plan.width - 2].run({"drafting_rows": rows}, plan.num_seqs)

    def after(self, plan: StepPlan, inputs: Sections, input_ids: Tensor, seen: Tensor) -> None:
        """Keep the hidden state of each row's last token that stays; nothing of a row without any."""
        rows = inputs["req_pool_indices"]
        q_start = inputs["q_start"] if "q_start" in inputs else self._counts[: plan.num_seqs + 1]
        if plan.width > 1:
            num_new = self._ops.steps.gather(self._rows.kv_lens, rows) - self._lens
        else:
            num_new = q_start.diff().long()
        self.keep(rows, seen, q_start, num_new)

    def keep(self, rows: Tensor, hidden: Tensor, q_start: Tensor, num_new: Tensor) -> None:
        """Keep for each of `rows` [S] int32 the entry of hidden [T, H] of its `num_new`-th token [S] int64: its tokens
        begin at q_start [S + 1] int32. Nothing of a row with 0."""
        if not len(hidden):
            return
        wide, kept = rows.long(), self.kept[_HIDDEN]
        found = hidden.index_select(0, (q_start[:-1] + num_new - 1).clamp(min=0))
        kept.index_copy_(0, wide, torch.where((num_new > 0).unsqueeze(1), found, kept.index_select(0, wide)))

    def capture_next(self) -> bool:
        """As `GraphRunner.capture_next`, the longest drafts first."""
        return any(runner.capture_next() for runner in reversed(self.runners))

    def drop_graphs(self) -> None:
        for runner in self.runners:
            runner.drop_graphs()

    def reset_padding(self) -> None:
        self.kept.reset_padding()
