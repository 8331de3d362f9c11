"""Kernels of pictures: one program per block of a row."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.pictures import PictureOps
from forebay.ops.triton.launch import kernel

_BLOCK: Final = 1024  # entries of a row


@kernel
@triton.jit
def _take_rows(x, table, apart, rows, n, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (entry < n) & (row > 0)
    taken = tl.load(table + row * apart + entry, mask=live, other=0.0)
    if ADDS:
        own = tl.load(x + at * n + entry, mask=live, other=0.0)
        taken = (own.to(tl.float32) + taken.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(x + at * n + entry, taken, mask=live)


class TritonPictures(PictureOps):
    """See `PictureOps`."""

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        return _taken(x, table, rows, adds=False)

    def add_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        return _taken(x, table, rows, adds=True)


def _taken(x: Tensor, table: Tensor, rows: Tensor, *, adds: bool) -> Tensor:
    count, n = x.shape
    if count:
        blocks = count, triton.cdiv(n, _BLOCK)
        _take_rows[blocks](x, table, table.stride(0), rows, n, ADDS=adds, BLOCK=_BLOCK)
    return x
