"""Steps that have prompts in them, as steps of fixed shape: some tokens of any sequences, hidden states out.

On a CPU the Python between the kernels of such a step would leave both cores idle for a tenth of it.

Shape letters: T tokens, S sequences, both padding included; W of the tokens are padding, or W is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

import torch
from torch import Tensor

from forebay.pools.table import Column, Table
from forebay.runtime.forward import Forward, HiddenStates, StepTokens
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.kinds import STOPS, of_prompts
from forebay.runtime.plan_columns import padded

_PATIENCE: Final = 2  # steps of a size that come once only are not worth a capture, which runs the step on padding
# Steps between the numbers of tokens that are captured, the fine one up to a bound: a padded token costs its share.
_FINE: Final = 16
_COARSE: Final = 32
_FINE_UP_TO: Final = 256


class Tokens(Table):
    declared = padded("T")
    input_ids = Column(torch.int64, pad=0)
    positions = Column(torch.int64, pad=0)


class Sequences(Table):
    """The first padded sequence has all W padded tokens (W is at least 1) and all snapshots that are none, the others
    have nothing."""

    declared = padded("S")
    q_ends = Column(torch.int32, pad="T")  # the token after each sequence's last; T of a padded one
    snap_stops = Column(torch.int32, pad="T")  # the snapshot after each sequence's last

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0, "W": 1})
        self.q_start, self.snap_start = self._from_zero("q_ends"), self._from_zero("snap_stops")

    def _from_zero(self, ends: str) -> Tensor:
        """[S + 1], 0 and then the column `ends`."""
        bounds = torch.cat([self[ends].new_zeros(1), self[ends]])
        self._tensors[ends] = bounds[1:]
        return bounds


class Stops(Table):
    """Where kinds of cache keep what a sequence is by then: behind each token once at most."""

    declared = STOPS


class ExtendInputs:
    """Tables that are filled together; `num_rows` are the tokens. There is room for one sequence more than may run, so
    that a padded token always has one to belong to."""

    columns = (*Tokens.declared, *Sequences.declared, *Stops.declared)

    def __init__(self, tokens: Tokens, sequences: Sequences, stops: Stops) -> None:
        self.tokens, self.sequences, self.stops = tokens, sequences, stops

    @property
    def num_rows(self) -> int:
        return self.tokens.num_rows

    def fill(self, values: Mapping[str, Tensor], n: int, padded: int) -> Self:
        """Columns of tokens have n values, those of sequences and of snapshots as many as there are."""
        sizes = {"T": padded, "W": max(1, padded - n)}
        for table, rows in ((self.sequences, self.sequences.num_rows), (self.stops, padded)):
            own = {name: value for name, value in values.items() if name in table.declared}
            table.fill(own, len(next(iter(own.values()), ())), rows, **sizes)
        self.tokens.fill({name: value for name, value in values.items() if name in Tokens.declared}, n, padded)
        return self.head(padded)

    def __getitem__(self, name: str) -> Tensor:
        table = next(t for t in (self.tokens, self.sequences, self.stops) if name in t.declared)
        return table[name]

    def head(self, n: int) -> Self:
        return type(self)(self.tokens.head(n), self.sequences, self.stops.head(n))


class ExtendStep:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, inputs: ExtendInputs) -> HiddenStates:
        bounds = {"q_start": inputs.sequences.q_start, "snap_start": inputs.sequences.snap_start}
        kinds = of_prompts(inputs, **bounds)
        return self._forward.hidden(StepTokens.of(inputs, q_start=bounds["q_start"], kinds=kinds))


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
    step, sizes = ExtendStep(forward), _token_counts(most)
    return GraphRunner(step, inputs, writes=(), sizes=sizes, backend=backend, patience=_PATIENCE)


def _token_counts(most: int) -> list[int]:
    fine = range(_FINE, min(most, _FINE_UP_TO), _FINE)
    coarse = range(_FINE_UP_TO, most, _COARSE)
    return [*fine, *coarse, most]
