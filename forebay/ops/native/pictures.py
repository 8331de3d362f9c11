"""The native twins of the ops in pictures.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels, view
from forebay.ops.reference.pictures import PictureOps, PixelScale


class NativePictures(PictureOps):
    """See `PictureOps`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._patch_rows = kernels.by_dtype("fb_patch_rows_{}")
        self._mean_rows = kernels.by_dtype("fb_mean_rows_{}")
        self._replace_rows = kernels.bind("fb_replace_rows")
        self._add_rows = kernels.by_dtype("fb_add_rows_{}")

    def patch_rows(self, pixels: Tensor, size: int, scale: PixelScale, dtype: torch.dtype) -> Tensor:
        height, width, channels = shape = pixels.shape
        out = torch.empty((height // size) * (width // size), channels * size * size, dtype=dtype)
        numbers = scale.factor.data_ptr(), scale.shift.data_ptr(), out.data_ptr()
        self._patch_rows[dtype](self._pool, pixels.data_ptr(), *numbers, *shape, size)
        return out

    def mean_rows(self, x: Tensor, count: int) -> Tensor:
        rows, width = x.shape
        out = x.new_empty(rows // count, width)
        self._mean_rows[x.dtype](self._pool, x.data_ptr(), out.data_ptr(), rows // count, count, width)
        return out

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        at, apart = view(table)
        row_bytes, size = x.shape[1] * x.itemsize, x.itemsize
        self._replace_rows(self._pool, x.data_ptr(), at, apart * size, rows.data_ptr(), row_bytes, x.shape[0])
        return x

    def add_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        count, width = x.shape
        self._add_rows[x.dtype](self._pool, x.data_ptr(), *view(table), rows.data_ptr(), width, count)
        return x
