"""Tensors of a GGUF file as they are read: decoded in pieces, with their rows in another order if need be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.file_array import FileArray
from forebay.formats.gguf import GgufFile, GgufTensor
from forebay.formats.gguf_types import dequantize, split
from forebay.formats.quantized import Order, StoredCodes, stored_codes

# Elements decoded at a time: the float32 piece then stays in the second-level cache. 64 Ki and 128 Ki were the best of
# 32 Ki to 1 Mi for the Q4_1 tensors of the embedded model (0.20 s of numpy on one core; 0.25 s at 1 Mi).
PIECE_ELEMENTS: Final = 1 << 17


def rotary_row_order(file: GgufFile, stored: GgufTensor, heads: int) -> Order:
    """Return where in the file each output row is: rotary pairs are stored as (0, 1), (2, 3).. of a head and paired
    here as (0, D/2), (1, D/2 + 1).. Raises ModelError for rows that do not divide into heads of pairs."""
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{file.path}: tensor {stored.name!r} has {rows} rows, which {heads} heads cannot share")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


class GgufStored:
    """A tensor of a GGUF file: raw [rows, bytes per row], `order` the stored row of each row (element, where 1-D)."""

    bfloat16 = False

    def __init__(self, stored: GgufTensor, raw: FileArray, shape: tuple[int, ...], order: Order | None) -> None:
        self._stored = stored
        self._raw = raw
        self._order = order
        self.shape = shape
        self.num_bytes = raw.nbytes
        self.storage = stored.type.name

    @property
    def codes(self) -> StoredCodes | None:
        """Return the values as the file holds them; None if they are no codes, or no matrix."""
        block = self._stored.type
        if block.codes is None or len(self.shape) != 2:
            return None
        rows, width = self.shape
        codes = stored_codes(block.codes, (rows, width), lambda: lambda order: split(self._raw.take(order), block))
        return codes if self._order is None else codes.rows(self._order)

    def array(self) -> FileArray:
        """Return the rows as they are in the file and in its order, unread."""
        return self._raw

    def part(self, first: int, stop: int) -> GgufStored:
        """Return the rows from `first` up to `stop` of all matrices of the tensor, one below the other, as a matrix; of
        a vector so many elements. They are in the file's order."""
        if len(self.shape) == 1:
            return GgufStored(self._stored, self._raw, (stop - first,), np.arange(first, stop))
        rows = math.prod(self.shape[:-1])
        raw = self._raw.reshape(rows, self._raw.nbytes // rows)
        return GgufStored(self._stored, raw.part(first, stop), (stop - first, self.shape[-1]), None)

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Decode the tensor as consecutive blocks of rows, float32."""
        block = self._stored.type
        if len(self.shape) == 1:
            values = dequantize(self._raw.read(), block)
            yield values if self._order is None else values[:, self._order]
            return
        step = max(1, PIECE_ELEMENTS // self.shape[-1])
        for first in range(0, len(self._raw), step):
            stop = min(first + step, len(self._raw))
            raw = self._raw.part(first, stop).read() if self._order is None else self._raw.take(self._order[first:stop])
            yield dequantize(raw, block)
