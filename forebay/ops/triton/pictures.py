"""Kernels of pictures: one program per block of a row."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.pictures import PictureOps

_BLOCK: Final = 1024  # entries of a row


@triton.jit
def _replace_rows(x, table, rows, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (entry < n) & (row > 0)
    tl.store(x + at * n + entry, tl.load(table + row * n + entry, mask=live, other=0.0), mask=live)


class TritonPictures(PictureOps):
    """See `PictureOps`."""

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        count, n = x.shape
        if count:
            _replace_rows[(count, triton.cdiv(n, _BLOCK))](x, table, rows, n, BLOCK=_BLOCK)
        return x
