"""Log-probabilities of the model's own distribution, before penalties, temperature and filters.

Shape letters: M positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.requests.step_plan import TokenLogprob

# The logits of a block then fit in a processor's cache: with 49,152 tokens, blocks of 42 positions took 0.56 times what
# blocks of 256 did.
_BLOCK_BYTES: Final = 8 << 20
_MAX_BLOCK: Final = 256


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """logits [M, V] float32 and the tokens [M] that came there -> [M, 2 + 2k] float64, to be copied to the host whole:
    the token's log-probability and rank (1 + the number of more likely tokens), then k values and k ids, best first,
    equally likely ones in the order of their ids. k is at most V here.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = token_ids.unsqueeze(1)
    # Logits that differ may have equal logarithms once rounded: the order is that of the logits.
    rank = (logits > logits.gather(1, chosen)).sum(dim=-1, keepdim=True) + 1
    ids = _most_likely(logits, min(k, logits.shape[1]))
    columns = (logprobs.gather(1, chosen), rank, logprobs.gather(1, ids), ids)
    return torch.cat([column.double() for column in columns], dim=1)


def _most_likely(logits: Tensor, k: int) -> Tensor:
    """The ids [M, k] of the largest logits [M, V], equal ones in the order of their ids.

    `topk` says nothing about the order of equal entries, nor which of those equal to the smallest it takes, and both
    change with k: a second one chooses among the latter by id.
    """
    if k == 0:
        return logits.new_empty(len(logits), 0, dtype=torch.int64)
    values, ids = logits.topk(k, dim=-1)
    least = values[:, -1:]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[1]
    # A float32 holds ids exactly: no vocabulary has 2^24 tokens.
    lowest_first = torch.arange(vocab_size, 0, -1, device=logits.device, dtype=torch.float32)
    tied = vocab_size - torch.where(logits == least, lowest_first, 0.0).topk(k, dim=-1).values.long()
    place = torch.arange(k, device=logits.device) - (values > least).sum(dim=-1, keepdim=True)
    ids = torch.where(place < 0, ids.gather(1, by_value), tied.gather(1, place.clamp(min=0)))
    return ids.clamp_(max=vocab_size - 1)  # a row with a NaN has no ties, and must not index beyond the row


def block_size(vocab_size: int) -> int:
    """Return how many positions to score at a time: their logits then fit in a processor's cache."""
    return max(1, min(_MAX_BLOCK, _BLOCK_BYTES // (4 * vocab_size)))


def unpack(packed: npt.NDArray[Any], token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob | None]:
    """Rows of `token_logprobs` on the host, with `num_top[i]` of the k alternatives each; None where logits were not
    finite."""
    k = (packed.shape[1] - 2) // 2
    ids = packed[:, 2 + k :].astype(np.int64).tolist()
    entries: list[TokenLogprob | None] = []
    for (value, rank, *top_values), top_ids, token, n in zip(packed.tolist(), ids, token_ids, num_top, strict=True):
        known = not math.isnan(value)
        entries.append(TokenLogprob(token, value, int(rank), top_ids[:n], top_values[: min(n, k)]) if known else None)
    return entries
