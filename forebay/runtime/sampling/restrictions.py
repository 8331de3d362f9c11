"""Tokens that a request may not have next, whatever their logits: its ends before its least length, all but those that
are allowed, and tokens that would complete one of its bad words.

Shape letters: n positions, V vocabulary, E ends, W words, L tokens of the longest but its last.
"""

from __future__ import annotations

from math import inf
from typing import Final

import torch
from torch import Tensor

from forebay.requests.step_plan import Admission

_ANY: Final = -1  # what is before a shorter word; and before an output, where it is no token


class Restrictions:
    """Restrictions of one request, on the device: the host may not know how many of its tokens were accepted."""

    def __init__(self, admission: Admission, vocab_size: int, device: torch.device) -> None:
        params, output = admission.params, admission.token_ids[admission.num_prompt :].tolist()
        words = [word for word in params.bad_words if isinstance(word, tuple)]
        length = max(map(len, words), default=1) - 1

        def ids(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._ends = ids(admission.stop_ids)  # [E]
        self._num_before_end = ids(params.min_tokens - len(output))  # so many tokens more before one of these may come
        self._forbidden: Tensor | None = None  # [V]
        if params.allowed_token_ids:
            everything = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden = everything.index_fill_(0, ids(params.allowed_token_ids), False)
        self._heads = ids([[_ANY] * (length + 1 - len(word)) + [*word[:-1]] for word in words]).reshape(
            len(words), length
        )
        self._lasts = ids([word[-1] for word in words])  # [W]
        self._tail = ids(([_ANY] * length + output)[len(output) :])  # [L], the last of the output

    def apply(self, logits: Tensor, draft_tokens: Tensor) -> None:
        """Let nothing of that come by logits [n, V], in place, which are behind the output and the first of the n - 1
        draft tokens that follow it."""
        n, zero = len(logits), logits.new_zeros(())
        if len(self._ends):
            too_early = torch.arange(n, device=logits.device) < self._num_before_end
            logits.index_add_(1, self._ends, torch.where(too_early, -inf, zero).unsqueeze(1).expand(n, len(self._ends)))
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -inf)
        if len(self._lasts):
            before = torch.cat([self._tail, draft_tokens]).unfold(0, len(self._tail), 1).unsqueeze(1)  # [n, 1, L]
            completes = ((self._heads == _ANY) | (self._heads == before)).all(dim=2)  # [n, W]
            logits.index_add_(1, self._lasts, torch.where(completes, -inf, zero))

    def record(self, token_ids: Tensor, num_new: Tensor | None) -> None:
        """The first num_new [] of token_ids [n] have come, or all of them."""
        count = torch.full_like(self._num_before_end, len(token_ids)) if num_new is None else num_new
        self._num_before_end = self._num_before_end - count
        if len(self._tail):
            places = torch.arange(len(self._tail), device=token_ids.device) + count
            self._tail = torch.cat([self._tail, token_ids]).index_select(0, places)
