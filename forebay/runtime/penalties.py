"""Penalties and logit bias: what a request's own tokens and wishes do to its logits. V is the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.requests.step_plan import Admission


class _RowState:
    """The tokens one request has produced so far, on the device; the host never reads them."""

    def __init__(self, admission: Admission, vocab_size: int, device: torch.device) -> None:
        params = self.params = admission.params
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64, device=device)
        output = tokens[admission.num_prompt :]
        self.counts = torch.zeros(vocab_size, device=device)  # of each token in the output
        self.counts.index_add_(0, output, torch.ones(len(output), device=device))
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, tokens, True)

    def apply(self, logits: Tensor) -> None:
        """Repetition (over prompt and output; arXiv 1909.05858, section 4.1), presence and frequency (over the output
        alone; OpenAI's definition), then logit bias, to logits [V] in place."""
        params = self.params
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            penalized = torch.where(logits > 0, logits / factor, logits * factor)
            logits.copy_(torch.where(self.seen, penalized, logits))
        if params.frequency_penalty != 0.0:
            logits.sub_(self.counts * params.frequency_penalty)
        if params.presence_penalty != 0.0:
            logits.sub_((self.counts > 0) * params.presence_penalty)
        logits.index_add_(0, self.bias_ids, self.bias)

    def record(self, token: Tensor) -> None:
        """The next token of the output, [1]."""
        self.counts.index_add_(0, token, self.counts.new_ones(1))
        self.seen.index_fill_(0, token, True)


class Penalties:
    """The states of the rows that have penalties or a logit bias: a Python loop over these rows only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _RowState] = {}

    def admit(self, admission: Admission) -> None:
        """The row has a new tenant: count what it brings along, after a retraction its output too."""
        self._states.pop(admission.row, None)
        if admission.params.adjusts:
            self._states[admission.row] = _RowState(admission, self._vocab_size, self._device)

    def apply(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """logits [N, V] of `rows`, adjusted, as a copy: log-probabilities are those of the model's own."""
        logits = logits.clone()
        for i, row in enumerate(rows):
            if row in self._states:
                self._states[row].apply(logits[i])
        return logits

    def record(self, token_ids: Tensor, rows: Sequence[int]) -> None:
        """token_ids [N], just sampled for `rows`, belong to their outputs from now on."""
        for i, row in enumerate(rows):
            if row in self._states:
                self._states[row].record(token_ids[i : i + 1])
