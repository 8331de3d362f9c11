"""Changes of logits by a request's own tokens and parameters: penalties and logit bias, and then restrictions. V is the
vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.memory.slots import Ids
from forebay.requests.step_plan import Admission
from forebay.runtime.sampling.restrictions import Restrictions


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
        self.brought = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, tokens, True)

    def apply(self, logits: Tensor, draft_tokens: Tensor) -> None:
        """Adjust logits [n, V], in place, behind the output and the first of the n - 1 draft tokens that follow it."""
        counts = self.counts
        for j, at in enumerate(logits):
            self._adjust(at, counts)
            if j < len(draft_tokens):
                counts = counts.index_add(0, draft_tokens[j : j + 1], counts.new_ones(1))

    def _adjust(self, logits: Tensor, counts: Tensor) -> None:
        """Repetition (over prompt and output; arXiv 1909.05858, section 4.1), presence and frequency (over the output
        alone; OpenAI's definition), then logit bias, to logits [V] in place; counts [V] are those of the output."""
        params = self.params
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            penalized = torch.where(logits > 0, logits / factor, logits * factor)
            logits.copy_(torch.where(self.brought | (counts > 0), penalized, logits))
        if params.frequency_penalty != 0.0:
            logits.sub_(counts * params.frequency_penalty)
        if params.presence_penalty != 0.0:
            logits.sub_((counts > 0) * params.presence_penalty)
        logits.index_add_(0, self.bias_ids, self.bias)

    def record(self, token_ids: Tensor, num_new: Tensor | None) -> None:
        """Count the first num_new [] of token_ids [n], or all of them."""
        if num_new is None:
            new = self.counts.new_ones(len(token_ids))
        else:
            new = (torch.arange(len(token_ids), device=token_ids.device) < num_new).to(self.counts.dtype)
        self.counts.index_add_(0, token_ids, new)


class Span(NamedTuple):
    """A row's entries of the positions that are sampled from."""

    row: int
    first: int
    stop: int


def spans_of(rows: Ids, q_lens: Ids | None = None) -> list[Span]:
    """Return the spans of rows with as many entries each, or with one."""
    stops = range(1, len(rows) + 1) if q_lens is None else np.cumsum(q_lens).tolist()
    return [Span(row, first, stop) for row, first, stop in zip(rows.tolist(), (0, *stops), stops, strict=False)]


class Penalties:
    """The states of the rows that have penalties, a logit bias or restrictions: a Python loop over these rows only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _RowState] = {}
        self._restrictions: dict[int, Restrictions] = {}

    def admit(self, admission: Admission) -> None:
        """The row has a new tenant: count what it brings along, after a retraction its output too."""
        self._states.pop(admission.row, None)
        self._restrictions.pop(admission.row, None)
        if admission.params.penalizes:
            self._states[admission.row] = _RowState(admission, self._vocab_size, self._device)
        if admission.params.restricts:
            self._restrictions[admission.row] = Restrictions(admission, self._vocab_size, self._device)

    def apply(self, logits: Tensor, spans: Sequence[Span], input_ids: Tensor | None = None) -> Tensor:
        """logits [N, V] of the spans, adjusted, as a copy: log-probabilities are those of the model's own. A span's
        entries behind its first are those of draft tokens, input_ids [N]."""
        logits = logits.clone()
        for row, first, stop in spans:
            for by_row in (self._states, self._restrictions):
                if row in by_row:
                    drafts = torch.empty(0, dtype=torch.int64, device=logits.device)
                    by_row[row].apply(logits[first:stop], drafts if input_ids is None else input_ids[first + 1 : stop])
        return logits

    def record(self, token_ids: Tensor, spans: Sequence[Span], num_new: Tensor | None = None) -> None:
        """token_ids [N], just sampled for the spans, belong to their outputs from now on; of each span the first
        num_new [spans], if not all of them stay."""
        for i, (row, first, stop) in enumerate(spans):
            for by_row in (self._states, self._restrictions):
                if row in by_row:
                    by_row[row].record(token_ids[first:stop], None if num_new is None else num_new[i])
