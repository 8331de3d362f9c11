"""Steps that have prompts in them, as steps of fixed shape: some tokens of any sequences, hidden states out.

On a CPU the Python between the kernels of such a step would leave both cores idle for a tenth of it.

Shape letters: T tokens, S sequences, both padding included.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forebay.pools.table import Column, Table
from forebay.runtime.forward import Batch, Forward, HiddenStates, StepTokens
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.kinds import STOPS, Columns, of_prompts
from forebay.runtime.ragged import RAGGED, RaggedInputs, from_zero

_PATIENCE: Final = 2  # steps of a size that come once only are not worth a capture, which runs the step on padding
# Steps between the numbers of tokens that are captured, the fine one up to a bound: a padded token costs its share.
_FINE: Final = 16
_COARSE: Final = 32
_FINE_UP_TO: Final = 256


class Tokens(Table):
    input_ids = Column(torch.int64, pad=0)


class Sequences(Table):
    """The first padded sequence has all padded tokens and all snapshots that are none, the others have nothing."""

    declared = RAGGED
    snap_stops = Column(torch.int32, pad="T")  # the snapshot after each sequence's last

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0})
        self.q_start, self.snap_start = from_zero(self, "q_ends"), from_zero(self, "snap_stops")


class Stops(Table):
    """Where kinds of cache keep what a sequence is by then: behind each token once at most."""

    declared = STOPS


class ExtendInputs(RaggedInputs):
    columns = (*Tokens.declared, *Sequences.declared, *Stops.declared)

    def __init__(self, tokens: Tokens, sequences: Sequences, stops: Stops) -> None:
        super().__init__(tokens, sequences, stops)
        self.tokens, self.sequences, self.stops = tokens, sequences, stops


class ExtendStep:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, inputs: ExtendInputs) -> HiddenStates:
        batch = Batch(inputs["req_pool_indices"], inputs.sequences.q_start)
        tokens = tokens_of(self._forward, batch, inputs, inputs["input_ids"], inputs.sequences.snap_start)
        return self._forward.hidden(tokens)


def tokens_of(forward: Forward, batch: Batch, columns: Columns, input_ids: Tensor, snap_start: Tensor) -> StepTokens:
    """Return the tokens of a step of any shape: `columns` are those of `Sequences` and `Stops` that are not given
    otherwise."""
    placed = forward.place(batch, len(input_ids))
    bounds = {"q_start": batch.q_start, "snap_start": snap_start, "positions": placed.positions}
    kinds = of_prompts(columns, **bounds, ops=forward.ops, cache=forward.cache)
    return StepTokens(input_ids=input_ids, batch=batch, placed=placed, kinds=kinds)


def extend_runner(
    forward: Forward, *, max_num_tokens: int, backend: GraphBackend
) -> GraphRunner[ExtendInputs, HiddenStates]:
    rows, cache = forward.rows, forward.cache
    # A padded sequence must not be longer than a row of the page table.
    most = min(max_num_tokens, rows.req_to_token.shape[1] * cache.page_size)
    device = rows.last_tokens.device
    inputs = ExtendInputs(
        Tokens(most, device=device), Sequences(rows.num_rows, device=device), Stops(most, device=device)
    )
    step, sizes = ExtendStep(forward), token_counts(most)
    return GraphRunner(step, inputs, writes=[(rows, "kv_lens")], sizes=sizes, backend=backend, patience=_PATIENCE)


def token_counts(most: int) -> list[int]:
    fine = range(_FINE, min(most, _FINE_UP_TO), _FINE)
    coarse = range(_FINE_UP_TO, most, _COARSE)
    return [*fine, *coarse, most]
