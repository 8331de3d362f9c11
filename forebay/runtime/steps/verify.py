"""Decodes with draft tokens, as a step of fixed shape: from the last tokens to those that are accepted.

Captured by the number of tokens, so that a row without drafts costs one of them.

Shape letters: T tokens, S sequences, both padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.memory.slots import Ids
from forebay.pools.table import Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner, default_sizes
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.build import VERIFY_COLUMNS
from forebay.runtime.kinds.kind import DeviceKind
from forebay.runtime.sampling.penalties import Span, spans_of
from forebay.runtime.steps.forward import Batch, Decoded, Forward, GreedyTokens, StepTokens
from forebay.runtime.steps.ragged import RAGGED, RaggedInputs, from_zero
from forebay.runtime.steps.shape import Computed, Step, StepShape

_MOST_LOGITS: Final = 1 << 26  # of a captured step, 256 MiB: graphs keep them


class VerifiedSequences(Table):
    declared = {**RAGGED, **VERIFY_COLUMNS}

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0})
        self.q_start = from_zero(self, "q_ends")


class VerifyInputs(RaggedInputs):
    columns = tuple(VerifiedSequences.declared)

    def __init__(self, tokens: Table, sequences: VerifiedSequences) -> None:
        super().__init__(tokens, sequences)
        self.sequences = sequences


class Verified(NamedTuple):
    """The step that kinds of cache settle. A reference to this keeps its memory."""

    inputs: VerifyInputs
    decoded: Decoded
    kinds: Mapping[str, Any]


class VerifyStep:
    """Row i's last token and its first drafts are read, and the accepted ones of them are written, in `RequestRows`.

    For rows with drafts, the state of a sequence is read and not written. Once the accepted tokens are known, `settle`
    runs the recurrences again for these tokens alone. State and inputs are the same, so the written bits are those of
    plain steps. It must not run earlier: a request may be able to resume only from the snapshot that it writes.
    """

    def __init__(self, forward: Forward, *, vocab_size: int) -> None:
        self._forward, self._vocab_size = forward, vocab_size
        self._verified: Verified | None = None

    def __call__(self, inputs: VerifyInputs) -> Decoded:
        self.forget()
        forward, num_tokens = self._forward, inputs.num_rows
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        placed = forward.place(batch, num_tokens)
        input_ids = forward.ops.steps.decode_ids(*batch, forward.known, num_tokens, self._vocab_size)
        kinds = forward.kind_inputs(Shape.DRAFTS, inputs, batch, placed)
        tokens = StepTokens(input_ids=input_ids, batch=batch, placed=placed, kinds=kinds)
        decoded = forward.decode(tokens, lambda chosen: forward.accept(chosen, placed.positions, batch))
        if settles(forward.kinds):
            self._verified = Verified(inputs, decoded, kinds)
        return decoded

    def settle(self) -> tuple[()]:
        """Let the kinds of cache follow the latest step's first `num_new` tokens."""
        assert self._verified is not None, "a step is settled behind it"
        inputs, decoded, kinds = self._verified
        for kind in self._forward.kinds:
            kind.settle(kinds[kind.name], inputs, inputs.sequences.q_start, decoded.positions, decoded.num_new)
        return ()

    def forget(self) -> None:
        self._verified = None


class VerifyShape(StepShape):
    """Steps of decodes with drafts. A token is chosen behind each token of each sequence; only the device knows which
    of them are accepted."""

    shape = Shape.DRAFTS
    padded = VerifyInputs.columns
    captured: GraphRunner[VerifyInputs, Decoded]

    def __init__(self, forward: Forward, *, most: int, vocab_size: int, backend: GraphBackend) -> None:
        """For steps of up to `most` tokens, which are captured as far as their logits are not too many."""
        super().__init__(forward)
        rows, step = forward.rows, VerifyStep(forward, vocab_size=vocab_size)
        device = rows.last_tokens.device
        # A padded sequence must not be longer than a row of the page table.
        longest = min(most, rows.req_to_token.shape[1] * forward.cache.page_size, max(1, _MOST_LOGITS // vocab_size))
        self.captured = GraphRunner(
            step,
            VerifyInputs(Table(most, device=device), VerifiedSequences(rows.num_rows, device=device)),
            writes=[(rows, "last_tokens"), (rows, "kv_lens")],
            settled=step if settles(forward.kinds) else None,
            sizes=default_sizes(longest, quickly=backend.captures_quickly),
            backend=backend,
            failed=forward.capture_failed,
        )

    def sampled_rows(self, plan: StepPlan) -> Ids:
        return np.repeat(plan.rows, plan.q_lens)

    def run(self, step: Step) -> Computed:
        columns = step.inputs.of(self.padded) | {"q_ends": step.inputs["q_start"][1:]}
        decoded = self.captured.run(columns, step.plan.num_tokens)
        num_new = decoded.num_new[: step.plan.num_seqs]
        return Computed(decoded.greedy, decoded.input_ids, decoded.seen, decoded.positions, num_new)

    def accept(self, chosen: GreedyTokens, step: Step, computed: Computed) -> None:
        assert computed.positions is not None
        assert computed.num_new is not None
        batch = Batch(step.inputs["req_pool_indices"], step.inputs["q_start"])
        computed.num_new.copy_(self._forward.accept(chosen, computed.positions, batch))

    def spans(self, step: Step) -> list[Span]:
        return spans_of(step.plan.rows, step.plan.q_lens)

    def outcome(self, chosen: GreedyTokens, step: Step, computed: Computed) -> list[Tensor]:
        """Return an id behind each token [T], and behind these `num_new` [S]."""
        assert computed.num_new is not None
        return [chosen.or_failed(), computed.num_new]


def settles(kinds: Iterable[DeviceKind]) -> bool:
    """Return True if any of the kinds settles behind a step."""
    return any(kind.settles for kind in kinds)
