"""Steps that have prompts in them, as steps of fixed shape: some tokens of any sequences, hidden states out.

On a CPU the Python between the kernels of such a step would leave both cores idle for a tenth of it. On an H100 it took
16 ms of an 8B model, as long as the kernels of 500 tokens.

Shape letters: T tokens, S sequences, both padding included.
"""

from __future__ import annotations

from itertools import count, takewhile
from typing import Final

import torch
from torch import Tensor

from forebay.memory.slots import PAD, Ids
from forebay.pools.request_rows import RequestRows
from forebay.pools.table import Column, Table
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.packing import Sections
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.build import END_COLUMNS, TOKEN_COLUMNS
from forebay.runtime.kinds.kind import Columns
from forebay.runtime.steps.forward import FAILED, Batch, Forward, GreedyTokens, HiddenStates, StepTokens
from forebay.runtime.steps.ragged import RAGGED, RaggedInputs, from_zero
from forebay.runtime.steps.shape import Computed, Step, StepShape

UNSET: Final = -1  # the rotary position of a token that follows from its place and its row
_PATIENCE: Final = 2  # steps of a size that come once only are not worth a capture, which runs the step on padding
# Steps between the numbers of tokens that are captured, the fine one up to a bound: a padded token costs its share.
_FINE: Final = 16
_COARSE: Final = 32
_FINE_UP_TO: Final = 256
# Of a GPU, whose graphs take longer and memory of their own: parts that the numbers between a power of two and the next
# are divided in, so that a fifth of a step is padding at most. With more tokens the kernels take longer than the host.
_PARTS: Final = 4
_GPU_UP_TO: Final = 2048


class Tokens(Table):
    input_ids = Column(torch.int64, pad=0)


class PictureTokens(Tokens):
    """Tokens of a model with an encoder, some of which take rows of encodings."""

    encoded_rows = Column(torch.int32, pad=PAD)


class SpanTokens(PictureTokens):
    """Tokens of a model with attention in both directions within pictures."""

    ahead = Column(torch.int32, pad=0)


class GridTokens(PictureTokens):
    """Tokens of a model with M-RoPE: those of prompts with pictures are given their rotary positions."""

    rope_positions = Column(torch.int64, (3,), pad=UNSET)


class Sequences(Table):
    """The first padded sequence has all padded tokens and whatever else is padding, the others have nothing.

    `bounds` are the columns [S + 1] of which a column of ends is the rest: `q_start`, and those of kinds of cache.
    """

    declared = {**RAGGED, **{ends: Column(torch.int32, pad="T") for ends in END_COLUMNS}}

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0})
        self.q_start = from_zero(self, "q_ends")
        self.bounds = {bounds: from_zero(self, ends) for ends, bounds in END_COLUMNS.items()}


class KindTokens(Table):
    """Inputs of the kinds of cache: one entry for each token at most."""

    declared = TOKEN_COLUMNS


class ExtendInputs(RaggedInputs):
    columns = tuple({**SpanTokens.declared, **GridTokens.declared, **Sequences.declared, **KindTokens.declared})

    def __init__(self, tokens: Tokens, sequences: Sequences, kinds: KindTokens) -> None:
        super().__init__(tokens, sequences, kinds)
        self.tokens, self.sequences, self.kinds = tokens, sequences, kinds

    def __getitem__(self, name: str) -> Tensor:
        bounds = self.sequences.bounds
        return bounds[name] if name in bounds else super().__getitem__(name)


class ExtendStep:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, inputs: ExtendInputs) -> HiddenStates:
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        return self._forward.hidden(tokens_of(self._forward, batch, inputs, inputs["input_ids"]))


def tokens_of(forward: Forward, batch: Batch, columns: Columns, input_ids: Tensor) -> StepTokens:
    """Return the tokens of a step of any shape, with the inputs of the kinds of cache and of pictures from
    `columns`."""
    placed = forward.place(batch, len(input_ids))
    kinds = forward.kind_inputs(Shape.TOKENS, columns, batch, placed)
    encoded_rows = ahead = rope_positions = None
    if forward.encodings is not None:
        encoded_rows = _present(columns["encoded_rows"])
        if forward.encodings.bidirectional:
            ahead = _present(columns["ahead"])
    if forward.rows.rope_delta is not None:
        rope_positions = _present(columns["rope_positions"].view(-1, 3))
    return StepTokens(
        input_ids=input_ids,
        batch=batch,
        placed=placed,
        kinds=kinds,
        encoded_rows=encoded_rows,
        ahead=ahead,
        rope_positions=rope_positions,
    )


def _present(column: Tensor) -> Tensor | None:
    """Return the column, None for one without an entry."""
    return column if len(column) else None


class ExtendShape(StepShape):
    """Steps of any tokens, whose decodes have one each. The part that is captured ends with the hidden states: only the
    last position of a sequence in `sample_mask` is sampled from."""

    shape = Shape.TOKENS
    padded = ExtendInputs.columns
    captured: GraphRunner[ExtendInputs, HiddenStates] | None

    def __init__(self, forward: Forward, *, max_num_tokens: int, backend: GraphBackend) -> None:
        super().__init__(forward)
        self.captured = _captured(forward, max_num_tokens, backend) if backend.captures_prompts else None

    def sampled_rows(self, plan: StepPlan) -> Ids:
        return plan.rows[plan.sample_mask]

    def run(self, step: Step) -> Computed:
        plan, inputs = step.plan, step.inputs
        input_ids = input_ids_of(self._forward.rows, plan, inputs)
        ran = self._hidden(plan, inputs, input_ids)
        every = len(step.sampling.rows) == plan.num_tokens
        greedy = self._forward.greedy(ran.hidden if every else ran.hidden.index_select(0, inputs["sample_tokens"]))
        computed = Computed(greedy, input_ids, ran.seen, hidden=ran)
        self.accept(greedy, step, computed)
        return computed

    def _hidden(self, plan: StepPlan, inputs: Sections, input_ids: Tensor) -> HiddenStates:
        if self.captured is not None and 0 < plan.num_tokens <= self.captured.sizes[-1]:
            return self.captured.run(self._columns(inputs, input_ids), plan.num_tokens)
        batch = Batch(inputs["req_pool_indices"], inputs["q_start"])
        return self._forward.hidden(tokens_of(self._forward, batch, inputs, input_ids))

    def _columns(self, inputs: Sections, input_ids: Tensor) -> dict[str, Tensor]:
        computed = {"input_ids": input_ids, "q_ends": inputs["q_start"][1:]}
        if "rope_positions" in inputs:
            computed["rope_positions"] = inputs["rope_positions"].view(-1, 3)
        computed |= {ends: inputs[bounds][1:] for ends, bounds in END_COLUMNS.items() if bounds in inputs}
        return inputs.of(self.padded) | computed

    def next_positions(self, step: Step, computed: Computed) -> Tensor:
        return self._forward.ops.steps.gather(self._forward.rows.kv_lens, step.inputs["sample_rows"])

    def outcome(self, chosen: GreedyTokens, step: Step, computed: Computed) -> list[Tensor]:
        """Return an id of each sequence [S], any value if nothing is sampled. The values that a chunk leaves in the
        caches are finite if its hidden states are (decision 0014), so chunks that sample nothing are checked as
        well."""
        assert computed.hidden is not None
        token_ids, finite, inputs = chosen.or_failed(), computed.hidden.finite, step.inputs
        broken = torch.zeros(len(finite) + 1, dtype=torch.int64, device=finite.device)
        torch.cumsum(~finite, 0, out=broken[1:])
        bounds = broken.index_select(0, inputs["q_start"])
        if len(token_ids) < len(bounds) - 1:
            ids = torch.zeros(len(bounds) - 1, dtype=torch.int64, device=finite.device)
            token_ids = ids.index_copy_(0, inputs["sample_seqs"], token_ids)
        return [token_ids.masked_fill(bounds[1:] != bounds[:-1], FAILED)]


def input_ids_of(rows: RequestRows, plan: StepPlan, inputs: Sections) -> Tensor:
    """Return the ids of all tokens [T]: those of prompts are in the plan, those of decodes on the device."""
    known = inputs["input_ids"]
    if not plan.num_decodes:
        return known
    return torch.cat([known, rows.last_tokens.index_select(0, inputs["req_pool_indices"][plan.num_extends :])])


def _captured(forward: Forward, max_num_tokens: int, backend: GraphBackend) -> GraphRunner[ExtendInputs, HiddenStates]:
    rows, cache = forward.rows, forward.cache
    # A padded sequence must not be longer than a row of the page table.
    most = min(max_num_tokens, rows.req_to_token.shape[1] * cache.page_size)
    device = rows.last_tokens.device
    tokens = Tokens
    if rows.rope_delta is not None:
        tokens = GridTokens
    elif forward.encodings is not None:
        tokens = SpanTokens if forward.encodings.bidirectional else PictureTokens
    sizes, quickly = token_counts(most, quickly=backend.captures_quickly), backend.captures_quickly
    inputs = ExtendInputs(
        tokens(sizes[-1], device=device), Sequences(rows.num_rows, device=device), KindTokens(sizes[-1], device=device)
    )
    step, patience = ExtendStep(forward), _PATIENCE if quickly else 0
    return GraphRunner(
        step,
        inputs,
        writes=[(rows, "kv_lens")],
        sizes=sizes,
        backend=backend,
        patience=patience,
        failed=forward.capture_failed,
    )


def token_counts(most: int, *, quickly: bool) -> list[int]:
    """Return the numbers of tokens to capture, up to `most`: fewer if graphs are not quickly made, on a GPU."""
    if not quickly:
        most = min(most, _GPU_UP_TO)
        powers = takewhile(lambda power: power < most, (_FINE << i for i in count()))
        parts = {power + i * power // _PARTS for power in powers for i in range(_PARTS)}
        return sorted({part for part in parts if part < most} | {most})
    fine = range(_FINE, min(most, _FINE_UP_TO), _FINE)
    coarse = range(_FINE_UP_TO, most, _COARSE)
    return [*fine, *coarse, most]
