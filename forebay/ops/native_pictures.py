"""The native twins of the ops in pictures.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.kernels import Kernels
from forebay.ops.pictures import PictureOps


class NativePictures(PictureOps):
    """See `PictureOps`."""

    def __init__(self, kernels: Kernels) -> None:
        self._pool = kernels.pool
        self._replace_rows = kernels.bind("fb_replace_rows")

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        row_bytes = x.shape[1] * x.itemsize
        self._replace_rows(self._pool, x.data_ptr(), table.data_ptr(), rows.data_ptr(), row_bytes, x.shape[0])
        return x
