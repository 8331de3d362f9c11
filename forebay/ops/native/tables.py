"""The native twins of the ops in tables.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.native.kernels import Kernels
from forebay.ops.reference.tables import NgramHashes, RowTable, TableOps


class NativeTables(TableOps):
    """See `TableOps`. Every tensor is contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._pool = kernels.pool
        self._ngram_rows = kernels.by_dtype("fb_ngram_rows_{}")

    def ngram_rows(self, ids: Tensor, before: Tensor, hashes: NgramHashes, table: RowTable) -> Tensor:
        heads, tokens = len(hashes.sizes), len(ids)
        out = before.new_empty(tokens, heads * table.width)
        parts = (hashes.multipliers, hashes.sizes, hashes.offsets, table.places, out)
        given = ids.data_ptr(), before.data_ptr(), *(tensor.data_ptr() for tensor in parts)
        sizes = tokens, len(hashes.multipliers) - 1, heads, hashes.end, table.part_rows, table.width
        self._ngram_rows[before.dtype](self._pool, *given, *sizes)
        return out
