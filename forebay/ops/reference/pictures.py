"""The ops of pictures: a tile's patches as rows of numbers, and rows of encodings in a step's embeddings.

Shape letters: T tokens or patches, H hidden size, R rows of encodings with the padding row, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PixelScale:
    """A pixel's channels become numbers as value * factor + shift, each [C] float32."""

    factor: Tensor
    shift: Tensor


class PictureOps:
    """Defined in torch."""

    def patch_rows(self, pixels: Tensor, size: int, scale: PixelScale, dtype: torch.dtype) -> Tensor:
        """pixels [height, width, C] uint8, contiguous -> the patches of `size` x `size` pixels, row by row, each with
        its numbers by channel, row and column: [T, C * size * size] of dtype.

        A convolution whose stride is its kernel's size is a linear layer over these. Pixels to the right and below that
        fill no patch are left out. Computed in float32 and rounded once.
        """
        height, width, channels = pixels.shape
        rows, columns = height // size, width // size
        whole = pixels[: rows * size, : columns * size]
        numbers = (whole.float() * scale.factor + scale.shift).to(dtype)
        patches = numbers.reshape(rows, size, columns, size, channels).permute(0, 2, 4, 1, 3)
        return patches.reshape(rows * columns, channels * size * size)

    def mean_rows(self, x: Tensor, count: int) -> Tensor:
        """x [T * count, H], contiguous -> the means of `count` rows that follow each other [T, H], summed in float32 in
        their order and rounded once."""
        rows = x.view(-1, count, x.shape[1]).float()
        total = rows[:, 0]
        for i in range(1, count):
            total = total + rows[:, i]
        return (total * (1 / count)).to(x.dtype)

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        """x[t] = table[rows[t]] in place where rows[t] is not 0, the padding row, which is never read; x.

        x [T, H], contiguous, and table [R, H], perhaps part of wider rows, of one dtype, rows [T] int32.
        """
        return x.copy_(torch.where((rows > 0).unsqueeze(1), table.index_select(0, rows), x))

    def add_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        """x[t] += table[rows[t]] in place where rows[t] is not 0, the padding row, which is never read; x. Arguments as
        of `replace_rows_`; added in float32."""
        added = (x.float() + table.index_select(0, rows).float()).to(x.dtype)
        return x.copy_(torch.where((rows > 0).unsqueeze(1), added, x))
