"""Which weights are held in codes, of which formats, and how these are read or made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from forebay.base.errors import ModelError
from forebay.formats.file_array import Array
from forebay.formats.held_format import held_format
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_into, unwritten
from forebay.formats.quantized import (
    ENCODER_BITS,
    PANEL,
    CodeFormat,
    GroupQuantized,
    Order,
    StoredCodes,
    joined_codes,
    stored_codes,
)
from forebay.formats.stored_tensor import StoredTensor
from forebay.layers.params import Rows, TensorParam

Round = Callable[[Array, GroupQuantized, int], None]
"""`LinearOps.quantize_into`."""


def codes_of(
    param: TensorParam,
    tensors: Mapping[str, StoredTensor],
    quantization: Quantization,
    round_into: Round = quantize_into,
) -> StoredCodes | None:
    """Return the codes in which a weight is held; None if it is held in the model's dtype. Reads nothing."""
    if len(param.inner) != 1 or param.offset:
        return None
    codes = joined_codes(
        [codes_of_part(tensors[name], quantization, param.min_bits, round_into) for name in param.names]
    )
    if codes is not None and param.rows:
        codes = codes.rows(_order(param.rows))
    if codes is not None and param.scales:
        factors = np.concatenate([np.full(rows, factor, np.float32) for rows, factor in param.scales])
        codes = codes.scaled(factors)
    return _part(param, codes) if codes is not None and codes.packs else None


def _part(param: TensorParam, codes: StoredCodes) -> StoredCodes:
    """Return the rows that a rank has. Raises ModelError if these cannot be packed, as those of the whole can."""
    part = codes.rows(_order(param.own)) if param.own else codes
    if not part.packs:
        raise ModelError(f"{param.names[0]}: this number of ranks cuts within {PANEL} outputs of different formats")
    return part


def _order(rows: Rows) -> Order:
    return np.concatenate([np.arange(run.start, run.stop, run.step) for run in rows])


def stays_bfloat16(param: TensorParam, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a matrix that is not held in codes is held in the bfloat16 of its file, where the model's dtype is
    float32 and kernels widen it. Its numbers are then the same in half of the bytes."""
    return is_plain_matrix(param) and all(tensors[name].bfloat16 for name in param.names)


def is_plain_matrix(param: TensorParam) -> bool:
    """Return whether a weight is a matrix that is only multiplied with or looked up in, and is used as it is stored."""
    return len(param.inner) == 1 and not param.offset and not param.scales and param.min_bits <= ENCODER_BITS


def codes_of_part(
    tensor: StoredTensor, quantization: Quantization, min_bits: int, round_into: Round
) -> StoredCodes | None:
    """The codes of one tensor of a weight: its own, or rounded when they are read."""
    own = tensor.codes
    form = own if own is None else own.sources[0].format
    held = held_format(quantization, form, in_features=tensor.shape[-1], min_bits=min_bits)
    if held is None or held == form:
        return None if held is None else own
    rows, width = tensor.shape
    return stored_codes(held, (rows, width), lambda: _RoundedRows(tensor, held, round_into))


class _RoundedRows:
    """A `Reader` that rounds the rows of a tensor when they are asked for, one after the other. If they are asked for
    in another order, it rounds all and keeps their codes."""

    def __init__(self, tensor: StoredTensor, form: CodeFormat, round_into: Round) -> None:
        self._tensor, self._form, self._round_into = tensor, form, round_into
        self._next = 0
        self._unread = tensor.pieces()
        self._unrounded: Array | None = None  # of a piece that was read
        self._all: GroupQuantized | None = None

    def __call__(self, order: Order) -> GroupQuantized:
        if self._all is None and np.array_equal(order, np.arange(self._next, self._next + len(order))):
            return self._following(len(order))
        if self._all is None:
            self._next, self._unread, self._unrounded = 0, self._tensor.pieces(), None
            self._all = self._following(self._tensor.shape[0])
        return self._all.rows(order)

    def _following(self, count: int) -> GroupQuantized:
        out = unwritten(self._form, count, self._tensor.shape[1])
        done = 0
        while done < count:
            rows = np.ascontiguousarray(next(self._unread)) if self._unrounded is None else self._unrounded
            part, unrounded = rows[: count - done], rows[count - done :]
            self._round_into(part, out, done)
            self._unrounded = unrounded if len(unrounded) else None
            done += len(part)
        self._next += count
        return out
