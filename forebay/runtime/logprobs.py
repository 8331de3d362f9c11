"""Log-probabilities of the model's own distribution, before penalties, temperature and filters.

Shape letters: M positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.requests.step_plan import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """logits [M, V] float32 and the tokens [M] that came there -> [M, 2 + 2k] float64, to be copied to the host whole:
    the token's log-probability and rank (1 + the number of more likely tokens), then k values and k ids, best first.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    rank = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    values, ids = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return torch.cat((chosen.double(), rank.double(), values.double(), ids.double()), dim=1)


def unpack(packed: npt.NDArray[Any], token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob | None]:
    """Rows of `token_logprobs` on the host, with `num_top[i]` of the k alternatives each; None where logits were not
    finite."""
    k = (packed.shape[1] - 2) // 2
    ids = packed[:, 2 + k :].astype(np.int64).tolist()
    entries: list[TokenLogprob | None] = []
    for (value, rank, *rest), top_ids, token, n in zip(packed.tolist(), ids, token_ids, num_top, strict=True):
        known = not math.isnan(value)
        entries.append(TokenLogprob(token, value, int(rank), top_ids[:n], rest[:n]) if known else None)
    return entries
