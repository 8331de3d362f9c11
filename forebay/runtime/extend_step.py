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
from forebay.runtime.kinds import captures_prompts, of_prompts
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
    """The first padded sequence has all W padded tokens (W is at least 1), the others have none."""

    declared = padded("S")
    q_ends = Column(torch.int32, pad="T")  # the token after each sequence's last; T of a padded one

    def __init__(self, num_rows: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, device=device, sizes={"T": 0, "W": 1})
        self.q_start = torch.cat([self.q_ends.new_zeros(1), self.q_ends])
        self._tensors["q_ends"] = self.q_start[1:]


class ExtendInputs:
    """Two tables that are filled together; `num_rows` are the tokens. There is room for one sequence more than may run,
    so that a padded token always has one to belong to."""

    columns = (*Tokens.declared, *Sequences.declared)

    def __init__(self, tokens: Tokens, sequences: Sequences) -> None:
        self.tokens, self.sequences = tokens, sequences

    @property
    def num_rows(self) -> int:
        return self.tokens.num_rows

    def fill(self, values: Mapping[str, Tensor], n: int, padded: int) -> Self:
        """Columns of tokens have n values, those of sequences as many as there are."""
        of_sequences = {name: value for name, value in values.items() if name in Sequences.declared}
        of_tokens = {name: value for name, value in values.items() if name not in of_sequences}
        count = len(next(iter(of_sequences.values()), ()))
        self.sequences.fill(of_sequences, count, self.sequences.num_rows, T=padded, W=max(1, padded - n))
        self.tokens.fill(of_tokens, n, padded)
        return self.head(padded)

    def __getitem__(self, name: str) -> Tensor:
        return self.sequences[name] if name in Sequences.declared else self.tokens[name]

    def head(self, n: int) -> Self:
        return type(self)(self.tokens.head(n), self.sequences)


class ExtendStep:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._nothing = torch.empty(0, dtype=torch.int32, device=forward.rows.last_tokens.device)

    def __call__(self, inputs: ExtendInputs) -> HiddenStates:
        kinds = of_prompts(inputs, self._nothing)
        return self._forward.hidden(StepTokens.of(inputs, q_start=inputs.sequences.q_start, kinds=kinds))


def extend_runner(
    forward: Forward, *, max_num_tokens: int, backend: GraphBackend
) -> GraphRunner[ExtendInputs, HiddenStates]:
    rows, cache = forward.rows, forward.cache
    assert captures_prompts(cache), "the shape of a step with prompts is not fixed"
    # A padded sequence must not be longer than a row of the page table.
    most = min(max_num_tokens, rows.req_to_token.shape[1] * cache.page_size)
    device = rows.last_tokens.device
    inputs = ExtendInputs(Tokens(most, device=device), Sequences(rows.num_rows, device=device))
    step, sizes = ExtendStep(forward), _token_counts(most)
    return GraphRunner(step, inputs, writes=(), sizes=sizes, backend=backend, patience=_PATIENCE)


def _token_counts(most: int) -> list[int]:
    fine = range(_FINE, min(most, _FINE_UP_TO), _FINE)
    coarse = range(_FINE_UP_TO, most, _COARSE)
    return [*fine, *coarse, most]
