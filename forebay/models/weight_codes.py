"""Which weights are held in codes, of which formats, and how these are read or made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from forebay.formats.held_format import held_format
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_rows
from forebay.formats.quantized import (
    F32,
    HEAD_BITS,
    CodeFormat,
    Reader,
    StoredCodes,
    joined,
    joined_codes,
    stored_codes,
)
from forebay.formats.stored_tensor import StoredTensor, as_float32
from forebay.layers.params import TensorParam

# Values quantized at a time: several float32 copies of so many then stay in the second-level cache.
_PIECE_ELEMENTS = 1 << 17


def codes_of(param: TensorParam, tensors: Mapping[str, StoredTensor], quantization: Quantization) -> StoredCodes | None:
    """The codes in which a weight is held; None where it is held in the model's dtype. Reads nothing."""
    if len(param.inner) != 1 or param.offset:
        return None
    codes = joined_codes([_codes_of_part(tensors[name], quantization, param.min_bits) for name in param.names])
    if codes is not None and param.rows:
        codes = codes.rows(np.concatenate([np.arange(rows.start, rows.stop, rows.step) for rows in param.rows]))
    if codes is not None and param.scales:
        factors = np.concatenate([np.full(rows, factor, np.float32) for rows, factor in param.scales])
        codes = codes.scaled(factors)
    return codes if codes is not None and codes.packs else None


def stays_bfloat16(param: TensorParam, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a matrix that is not held in codes is held in the bfloat16 of its file, where the model's dtype is
    float32 and kernels widen it. Its numbers are then the same in half of the bytes."""
    return is_plain_matrix(param) and all(tensors[name].bfloat16 for name in param.names)


def is_plain_matrix(param: TensorParam) -> bool:
    """Return whether a weight is a matrix that is only multiplied with or looked up in, and is used as it is stored."""
    return len(param.inner) == 1 and not param.offset and not param.scales and param.min_bits <= HEAD_BITS


def _codes_of_part(tensor: StoredTensor, quantization: Quantization, min_bits: int) -> StoredCodes | None:
    own = tensor.codes
    form = own if own is None else own.sources[0].format
    held = held_format(quantization, form, in_features=tensor.shape[-1], min_bits=min_bits)
    if held is None or held == form:
        return None if held is None else own
    rows, width = tensor.shape
    return stored_codes(held, (rows, width), lambda: _rounded(tensor, held))


def _rounded(tensor: StoredTensor, form: CodeFormat) -> Reader:
    return joined([quantize_rows(rows, form.bits) for rows in _pieces(tensor)]).rows


def _pieces(tensor: StoredTensor) -> Iterator[F32]:
    for piece in tensor.pieces():
        step = max(1, _PIECE_ELEMENTS // piece.shape[1])
        for first in range(0, len(piece), step):
            yield as_float32(piece[first : first + step], bfloat16=tensor.bfloat16)
