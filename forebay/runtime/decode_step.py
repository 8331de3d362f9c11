"""One token for each of up to B rows, as a step of fixed shape: embedding to greedy token.

Shape letters: B rows, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from forebay.pools.table import Column, Table
from forebay.runtime.forward import Forward, GreedyTokens, StepTokens
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.kinds import TRACKED, of_decodes
from forebay.runtime.plan_columns import padded

_WIDTH: Final = 1  # tokens per row


class DecodeInputs(Table):
    """What differs from step to step. A padded row is request row 0 with W tokens, whose KV goes to page 0."""

    declared = {**padded("S", "T"), **TRACKED}
    positions = Column(torch.int64, pad=0)


class DecodeStep:
    """Row i's token is read from, and its successor written to, `last_tokens`."""

    def __init__(self, forward: Forward, *, most: int) -> None:
        self._forward = forward
        self._counts = torch.arange(most + 1, dtype=torch.int32, device=forward.rows.last_tokens.device)

    def __call__(self, inputs: DecodeInputs) -> GreedyTokens:
        n = inputs.num_rows
        q_start = self._counts[: n + 1]
        input_ids = self._forward.ops.gather(self._forward.rows.last_tokens, inputs["req_pool_indices"])
        kinds = of_decodes(inputs, q_start)
        return self._forward.decode(StepTokens.of(inputs, input_ids=input_ids, q_start=q_start, kinds=kinds))


def decode_runner(
    forward: Forward, *, sizes: Sequence[int], backend: GraphBackend
) -> GraphRunner[DecodeInputs, GreedyTokens]:
    rows, most = forward.rows, max(sizes)
    inputs = DecodeInputs(most, device=rows.last_tokens.device, sizes={"W": _WIDTH})
    step = DecodeStep(forward, most=most)
    return GraphRunner(step, inputs, writes=[(rows, "last_tokens")], sizes=sizes, backend=backend)
