"""The native twins of the ops in linear.py: thin calls into the compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.formats.file_array import Array
from forebay.formats.quantized import BEYOND_HALF, GROUP, PANEL, GroupQuantized, StoredCodes
from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.native.kernels import Kernels
from forebay.ops.weight_memory import LINE, OtherPieces, WeightMemory

_STEP = 32  # inputs, kStep of cpu/linear.h
_WORD_BYTES = 8  # of the header of a weight in codes
_VALUES = {np.float32: "f32", np.float16: "f16", np.uint16: "bf16"}  # that are quantized, the last as bits

LinearKernels = Mapping[tuple[torch.dtype, torch.dtype], Any]
"""By the dtypes of x and of the result."""

PanelKernels = Mapping[torch.dtype, int]
"""Addresses of `LinearPanels` of cpu/linear.h, by the dtype of x and of the result."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinearWeight:
    """The layout is that which cpu/linear.h names; `packed` and `bias` own the memory the kernels read.

    `activation_bits`: what inputs are rounded to, 0 for nothing.
    """

    packed: Tensor
    bias: Tensor
    packed_ptr: int
    bias_ptr: int
    in_features: int
    out_features: int
    kernels: LinearKernels
    panels: PanelKernels
    activation_bits: int = 0


class _DenseForm(NamedTuple):
    """Kernels of a weight that is not in codes: to pack it, and to multiply with it. Its rows are padded to a multiple
    of `step` inputs."""

    pack: Any
    kernels: LinearKernels
    panels: PanelKernels
    step: int


class CodePart(NamedTuple):
    """The struct of the same name in cpu/codes.h."""

    first_panel: int
    offset: int
    panel_bytes: int
    format: int
    blocks: int


class NativeLinear(LinearOps):
    """See `LinearOps`. x may be a view into wider rows; all else is contiguous."""

    widens_bfloat16 = True

    def __init__(self, kernels: Kernels, activation_bits: int, memory: WeightMemory) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._touch = kernels.touch
        self._memory = memory
        self._activation_bits = activation_bits
        self._dense = _dense_forms(kernels)
        self._pack_quantized = kernels.bind("fb_pack_q")
        self._code_format = kernels.bind("fb_code_format")
        self._quantize = {
            np.dtype(dtype): kernels.bind(f"fb_quantize_{suffix}", "fb_quantize_{}")
            for dtype, suffix in _VALUES.items()
        }
        self._linear_quantized = _linear_kernels(kernels, "fb_linear_q_{}")
        self._panels_quantized = kernels.addresses("fb_linear_panels_q_{}")
        self._embedding = kernels.bind("fb_embedding")
        self._embedding_widened = kernels.bind("fb_embedding_f32_of_bf16")
        self._embedding_packed = kernels.by_dtype("fb_embedding_q_{}")

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, *, inputs: torch.dtype | None = None
    ) -> NativeLinearWeight:
        weight, form = weight.contiguous(), self._dense[inputs or weight.dtype, weight.dtype]
        out_features, in_features = weight.shape
        depth = -(-in_features // form.step) * form.step
        packed = self._memory.take_packed(_width(out_features) * depth * weight.itemsize).view(weight.dtype)
        if not self._memory.filled:
            self._touch(packed)
            form.pack(self._pool, weight.data_ptr(), packed.data_ptr(), out_features, in_features)
        return self._packed(packed, bias, in_features, out_features, form.kernels, form.panels)

    def pack_quantized(self, weight: StoredCodes, bias: Tensor | None = None) -> NativeLinearWeight:
        out_features, in_features = weight.shape
        parts, num_bytes = self._parts(weight)
        packed = self._memory.take_packed(num_bytes)
        header = torch.tensor([self._activation_bits, len(parts), *itertools.chain(*parts)])
        there = packed[: header.nbytes]
        if not self._memory.filled:
            self._touch(packed)
            there.copy_(header.view(torch.uint8))
            self._pack_codes(weight, parts, packed)
        elif not torch.equal(there, header.view(torch.uint8)):
            # Kernels read what the header names without a check of their own.
            raise OtherPieces("a weight in codes has another header than the one that is there")
        whole = self._packed(packed, bias, in_features, out_features, self._linear_quantized, self._panels_quantized)
        return replace(whole, activation_bits=self._activation_bits)

    def _pack_codes(self, weight: StoredCodes, parts: list[CodePart], packed: Tensor) -> None:
        """Read the codes and pack them behind the header of `packed`."""
        for i, (part, (_, run)) in enumerate(zip(parts, weight.runs, strict=True)):
            described = packed.data_ptr() + _WORD_BYTES * (2 + i * len(part))
            panels = packed.data_ptr() + part.offset
            for piece in weight.pieces(run):
                arrays = (piece.codes, piece.scales, piece.minimums, piece.factors, piece.minimum_factors)
                kept = [array if array is None else np.ascontiguousarray(array) for array in arrays]
                pointers = map(_pointer, kept)
                self._pack_quantized(self._pool, *pointers, described, panels, *piece.shape)
                panels += len(piece.codes) // PANEL * part.panel_bytes

    def quantize_into(self, values: Array, out: GroupQuantized, first: int) -> None:
        num_rows, width = values.shape
        parts = [None if part is None else part[first:] for part in (out.codes, out.scales, out.minimums)]
        pointers = map(_pointer, (values, *parts))
        if not self._quantize[values.dtype](self._pool, *pointers, num_rows, width):
            raise ModelError(BEYOND_HALF)

    def _packed(
        self,
        packed: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        kernels: LinearKernels,
        panels: PanelKernels,
    ) -> NativeLinearWeight:
        padded_bias = self._memory.take_packed(_width(out_features) * torch.float32.itemsize).view(torch.float32)
        if not self._memory.filled:
            padded_bias.zero_()
            if bias is not None:
                padded_bias[:out_features] = bias
        return NativeLinearWeight(
            packed, padded_bias, packed.data_ptr(), padded_bias.data_ptr(), in_features, out_features, kernels, panels
        )

    def _parts(self, weight: StoredCodes) -> tuple[list[CodePart], int]:
        """The parts of a weight as it is packed, and its bytes with the header."""
        runs, parts = weight.runs, []
        end = -(-_WORD_BYTES * (2 + len(runs) * len(CodePart._fields)) // LINE) * LINE
        for form, rows in runs:
            number = self._code_format(form.bits, form.minimums, form.factors, form.levels, form.scales)
            assert number >= 0, form
            panel_bytes = form.num_bytes(PANEL * weight.shape[1])
            parts.append(CodePart(rows.start // PANEL, end, panel_bytes, number, form.group // GROUP))
            end += _width(len(rows)) // PANEL * panel_bytes
        return parts, end

    def apply(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, NativeLinearWeight), type(w)
        out = x.new_empty(x.shape[0], w.out_features)
        self._linear_into(x, w, out)
        return out

    def apply_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, NativeLinearWeight), type(w)
        out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        self._linear_into(x, w, out)
        return out

    def _linear_into(self, x: Tensor, w: NativeLinearWeight, out: Tensor) -> None:
        rows = x.shape[0]
        if rows:
            w.kernels[x.dtype, out.dtype](
                self._pool,
                x.data_ptr(),
                x.stride(0),
                w.packed_ptr,
                w.bias_ptr,
                out.data_ptr(),
                rows,
                w.in_features,
                w.out_features,
            )

    def embedding(self, ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        rows, width = ids.shape[0], table.shape[1]
        out = torch.empty(rows, width, dtype=dtype or table.dtype)
        addresses = ids.data_ptr(), table.data_ptr(), out.data_ptr()
        if out.dtype == table.dtype:
            self._embedding(self._pool, *addresses, rows, width * table.itemsize)
        else:
            assert (out.dtype, table.dtype) == (torch.float32, torch.bfloat16), (out.dtype, table.dtype)
            self._embedding_widened(self._pool, *addresses, rows, width)
        return out

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, NativeLinearWeight), type(table)
        assert table.kernels is self._linear_quantized, "a table that is not quantized"
        rows, width = ids.shape[0], table.in_features
        out = torch.empty(rows, width, dtype=dtype)
        self._embedding_packed[dtype](self._pool, ids.data_ptr(), table.packed_ptr, out.data_ptr(), rows, width)
        return out


def _dense_forms(kernels: Kernels) -> dict[tuple[torch.dtype, torch.dtype], _DenseForm]:
    """By the dtypes of x and of the weight."""
    pack, linear = kernels.by_dtype("fb_pack_{}"), _linear_kernels(kernels, "fb_linear_{}")
    panels = kernels.addresses("fb_linear_panels_{}")
    forms = {
        (dtype, dtype): _DenseForm(pack[dtype], linear, {dtype: panels[dtype]}, step)
        for dtype, step in ((torch.float32, 1), (torch.bfloat16, _STEP))
    }
    widened, suffix = (torch.float32, torch.bfloat16), "f32_of_bf16"
    forms[widened] = _DenseForm(
        kernels.bind(f"fb_pack_{suffix}"),
        {(torch.float32, torch.float32): kernels.bind(f"fb_linear_{suffix}")},
        {torch.float32: kernels.address(f"fb_linear_panels_{suffix}")},
        1,
    )
    return forms


def _linear_kernels(kernels: Kernels, pattern: str) -> LinearKernels:
    by_dtype = kernels.by_dtype(pattern)
    into_f32 = kernels.bind(pattern.format("bf16_f32"))
    same = {(dtype, dtype): kernel for dtype, kernel in by_dtype.items()}
    return {**same, (torch.bfloat16, torch.float32): into_f32}


def _pointer(array: Array | None) -> int | None:
    """Return where the array begins; `array.ctypes` takes twice as long."""
    return None if array is None else array.__array_interface__["data"][0]


def _width(out_features: int) -> int:
    return -(-out_features // PANEL) * PANEL
