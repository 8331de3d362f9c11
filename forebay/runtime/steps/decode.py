"""One token for each of up to B rows, as a step of fixed shape: embedding to greedy token.

Shape letters: B rows, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.memory.slots import Ids
from forebay.pools.table import Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.plan_columns import padded
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.build import DECODE_COLUMNS, of_kinds
from forebay.runtime.steps.forward import Batch, Decoded, Forward, StepTokens
from forebay.runtime.steps.shape import Computed, Step, StepShape


class DecodeInputs(Table):
    """The inputs that differ from step to step. A padded row is request row 0, whose KV goes to page 0."""

    declared = {**padded("S"), **DECODE_COLUMNS}


class DecodeStep:
    """Row i's token is read from, and its successor written to, `last_tokens`; its place comes from `kv_lens`, which
    grows by one."""

    def __init__(self, forward: Forward, *, most: int) -> None:
        self._forward = forward
        self._counts = torch.arange(most + 1, dtype=torch.int32, device=forward.rows.last_tokens.device)

    def __call__(self, inputs: DecodeInputs) -> Decoded:
        n = inputs.num_rows
        forward, batch = self._forward, Batch(inputs["req_pool_indices"], self._counts[: n + 1])
        placed = forward.place(batch, n)
        input_ids = forward.ops.steps.gather(forward.rows.last_tokens, batch.rows)
        kinds = forward.kind_inputs(Shape.DECODES, inputs, batch, placed)
        tokens = StepTokens(input_ids=input_ids, batch=batch, placed=placed, kinds=kinds)
        return forward.decode(tokens, lambda chosen: forward.accept(chosen, placed.positions, batch))


class DecodeShape(StepShape):
    """Steps of decodes of one token each."""

    shape = Shape.DECODES
    padded = tuple(DecodeInputs.declared)
    captured: GraphRunner[DecodeInputs, Decoded]

    def __init__(self, forward: Forward, *, sizes: Sequence[int], backend: GraphBackend) -> None:
        super().__init__(forward)
        rows, most = forward.rows, max(forward.rows.num_rows, *sizes)
        columns = of_kinds(DecodeInputs.declared, forward.kinds)
        inputs = DecodeInputs(most, columns=columns, device=rows.last_tokens.device)
        writes = [(rows, "last_tokens"), (rows, "kv_lens")]
        step = DecodeStep(forward, most=most)
        self.captured = GraphRunner(
            step, inputs, writes=writes, sizes=sizes, backend=backend, failed=forward.capture_failed
        )

    def sampled_rows(self, plan: StepPlan) -> Ids:
        return plan.rows

    def run(self, step: Step) -> Computed:
        decoded = self.captured.run(step.inputs.of(self.padded), step.plan.num_seqs)
        return Computed(decoded.greedy, decoded.input_ids, decoded.seen, decoded.positions)
