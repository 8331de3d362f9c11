"""The native twins of the ops in sampling.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels, address
from forebay.ops.reference.sampling import Draws, SamplingOps


class NativeSampling(SamplingOps):
    """See `SamplingOps`. All tensors are contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._finite_rows = kernels.by_dtype("fb_finite_rows_{}")
        self._argmax_rows = kernels.bind("fb_argmax_rows")
        self._mask_logits = kernels.bind("fb_mask_logits")
        self._sample_rows = kernels.bind("fb_sample_rows")

    def finite_rows(self, x: Tensor) -> Tensor:
        rows, n = x.shape
        finite = torch.empty(rows, dtype=torch.bool)
        self._finite_rows[x.dtype](self._pool, x.data_ptr(), finite.data_ptr(), rows, n)
        return finite

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._argmax_rows(self._pool, logits.data_ptr(), ids.data_ptr(), finite.data_ptr(), rows, n)
        return ids, finite

    def mask_logits(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        n, width = words.shape
        columns = logits.shape[1]
        self._mask_logits(self._pool, logits.data_ptr(), at.data_ptr(), words.data_ptr(), n, columns, width)

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        columns = map(address, draws)
        self._sample_rows(self._pool, logits.data_ptr(), *columns, ids.data_ptr(), rows, n)
        return ids
