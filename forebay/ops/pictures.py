"""The ops of pictures: their rows in a step's embeddings, and the attention of an encoder, for every backend.

Shape letters: T tokens, R rows of encodings with the padding row, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PictureOps:
    """Defined in torch."""

    def replace_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        """x[t] = table[rows[t]] in place where rows[t] is not 0, the padding row, which is never read; x.

        x [T, H] and table [R, H] of one dtype, rows [T] int32; all contiguous.
        """
        return x.copy_(torch.where((rows > 0).unsqueeze(1), table.index_select(0, rows), x))
