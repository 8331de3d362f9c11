"""Decodes with draft tokens, as a step of fixed shape: from the last tokens to those that are accepted.

Captured by the number of tokens, so that a row without drafts costs one of them.

Shape letters: T tokens, S sequences, both padding included.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forebay.pools.table import Table
from forebay.runtime.forward import Batch, Decoded, Forward, StepTokens
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner, default_sizes
from forebay.runtime.kinds import SCRATCH, WRITTEN, Columns, KindTokens, of_drafts, settle_kinds
from forebay.runtime.ragged import RAGGED, RaggedInputs, from_zero

_MOST_LOGITS: Final = 1 << 26  # of a captured step, 256 MiB: graphs keep them


class VerifiedTokens(Table):
    declared = SCRATCH


class VerifiedSequences(Table):
    declared = {**RAGGED, **WRITTEN}

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0})
        self.q_start = from_zero(self, "q_ends")


class VerifyInputs(RaggedInputs):
    columns = (*VerifiedTokens.declared, *VerifiedSequences.declared)

    def __init__(self, tokens: VerifiedTokens, sequences: VerifiedSequences) -> None:
        super().__init__(tokens, sequences)
        self.tokens, self.sequences = tokens, sequences


class VerifyStep:
    """Row i's last token and its first drafts are read, and what is accepted of them is written, in `RequestRows`."""

    def __init__(self, forward: Forward, *, vocab_size: int, most: int) -> None:
        self._forward, self._vocab_size = forward, vocab_size
        self._counts = torch.arange(most + 1, dtype=torch.int32, device=forward.rows.last_tokens.device)

    def __call__(self, inputs: VerifyInputs) -> Decoded:
        forward, num_tokens = self._forward, inputs.num_rows
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        placed = forward.place(batch, num_tokens)
        input_ids = forward.ops.decode_ids(*batch, forward.known, num_tokens, self._vocab_size)
        kinds = self._kinds(inputs, batch, num_tokens)
        tokens = StepTokens(input_ids=input_ids, batch=batch, placed=placed, kinds=kinds)
        return forward.decode(tokens, lambda chosen: forward.accept(chosen, placed.positions, batch))

    def settle_kinds(self, columns: Columns, batch: Batch, positions: Tensor, num_new: Tensor) -> None:
        """Let states follow the accepted tokens, once it is certain which those are: behind the step, of its columns
        without padding. What is copied to a slot that was wished for cannot be taken back."""
        kinds = self._kinds(columns, batch, len(positions))
        settle_kinds(columns, kinds, positions, num_new, ops=self._forward.ops, cache=self._forward.cache)

    def _kinds(self, columns: Columns, batch: Batch, num_tokens: int) -> KindTokens:
        return of_drafts(columns, batch.q_start, self._counts[: num_tokens + 1])


def verify_runner(
    forward: Forward, step: VerifyStep, *, most: int, vocab_size: int, backend: GraphBackend
) -> GraphRunner[VerifyInputs, Decoded]:
    """For steps of up to `most` tokens, which are captured as far as their logits are not too many."""
    rows, device = forward.rows, forward.rows.last_tokens.device
    inputs = VerifyInputs(VerifiedTokens(most, device=device), VerifiedSequences(rows.num_rows, device=device))
    # A padded sequence must not be longer than a row of the page table.
    captured = min(most, rows.req_to_token.shape[1] * forward.cache.page_size, max(1, _MOST_LOGITS // vocab_size))
    return GraphRunner(
        step,
        inputs,
        writes=[(rows, "last_tokens"), (rows, "kv_lens")],
        sizes=default_sizes(captured, quickly=backend.captures_quickly),
        backend=backend,
    )
