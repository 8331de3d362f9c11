"""The definition of the ops in linear.py, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.formats.file_array import Array
from forebay.formats.quantize import quantize_into
from forebay.formats.quantized import GROUP, PANEL, GroupQuantized, Levels, StoredCodes
from forebay.ops.linear import LinearOps, LinearWeight


@dataclass(frozen=True, slots=True)
class TorchLinearWeight:
    """`packed` is oneDNN's own blocked copy of a bfloat16 weight, where this torch can make one."""

    weight: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class TorchQuantizedWeight:
    """Codes [N, K] int8, the zero taken off, or floats of eight bits, scales and minimums [N, groups] float32, one
    format below the other."""

    parts: tuple[tuple[Tensor, Tensor, Tensor], ...]
    bias: Tensor | None
    in_features: int
    out_features: int

    def numbers(self, rows: Tensor | None = None) -> Tensor:
        """float32, of these rows or all."""
        if len(self.parts) > 1:
            opened = torch.cat([_opened(*part) for part in self.parts])
            return opened if rows is None else opened[rows]
        parts = self.parts[0] if rows is None else [part[rows] for part in self.parts[0]]
        return _opened(*parts)


def _codes(weight: GroupQuantized) -> Tensor:
    if weight.format.levels is Levels.E4M3:
        return torch.tensor(weight.codes).view(torch.float8_e4m3fn)
    return torch.tensor(weight.signed_codes()).to(torch.int8)


def _opened(codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    by_group = codes.float().view(*scales.shape, codes.shape[1] // scales.shape[1])
    return (scales.unsqueeze(-1) * by_group + minimums.unsqueeze(-1)).flatten(1)


class TorchLinear(LinearOps):
    """Defines the ops of linear layers. Weights in codes stay in codes, and are dequantized in each call."""

    widens_bfloat16 = False

    def __init__(self, activation_bits: int = 0) -> None:
        """`activation_bits`: what inputs of weights in codes are rounded to, 0 for nothing."""
        self._activation_bits = activation_bits

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, inputs: torch.dtype | None = None) -> LinearWeight:
        weight = weight.to(inputs or weight.dtype)
        out_features, in_features = weight.shape
        packed = _prepack(weight)
        kept = weight.clone() if packed is None else None
        return TorchLinearWeight(kept, packed, None if bias is None else bias.clone(), in_features, out_features)

    def pack_quantized(self, weight: StoredCodes, bias: Tensor | None = None) -> LinearWeight:
        parts = []
        for _, run in weight.runs:
            (whole,) = weight.pieces(run, (len(run) + PANEL) * weight.shape[1])
            scales, minimums = whole.steps()
            least = torch.zeros(scales.shape) if minimums is None else torch.tensor(minimums)
            parts.append((_codes(whole), torch.tensor(scales), least))
        out_features, in_features = weight.shape
        return TorchQuantizedWeight(tuple(parts), None if bias is None else bias.float(), in_features, out_features)

    def quantize_into(self, values: Array, out: GroupQuantized, first: int) -> None:
        quantize_into(values, out, first)

    def apply(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TorchQuantizedWeight):
            if self._activation_bits:
                return _exact_linear(rounded(x, self._activation_bits), w).to(x.dtype)
            return F.linear(x, w.numbers().to(x.dtype), w.bias if w.bias is None else w.bias.to(x.dtype))
        assert isinstance(w, TorchLinearWeight), type(w)
        if w.packed is None or x.shape[0] == 0:
            weight = x.new_zeros(w.out_features, w.in_features) if w.weight is None else w.weight
            return F.linear(x, weight, w.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.packed, w.bias, "none", [], "")
        return out

    def apply_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        return self.apply(x, w).float()

    def embedding(self, ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return table[ids].to(dtype or table.dtype)

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, TorchQuantizedWeight), type(table)
        return table.numbers(ids).to(dtype)


def _exact_linear(x: Tensor, w: TorchQuantizedWeight) -> Tensor:
    return F.linear(x.double(), w.numbers().double(), None if w.bias is None else w.bias.double())


def rounded(x: Tensor, bits: int) -> Tensor:
    """x [T, K], K a multiple of `GROUP`, as cpu/rounded.h has it -> [T, K] float32: in each group the nearest integers
    of `bits` bits, times a scale. Sums of products with it are exact only as integers."""
    largest_integer = torch.tensor({8: 127.0, 16: 127.0 * 256 + 127}[bits])  # a number would be divided in two steps
    groups = x.float().reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, largest_integer / largest, torch.where(largest.isnan(), largest, 0.0))
    return ((groups * inverse).round() * (largest / largest_integer)).flatten(1)


def _prepack(weight: Tensor) -> Tensor | None:
    """oneDNN re-packs a bfloat16 weight at every F.linear: doing it once is 3 times faster at 1 to 16 rows.

    None if this build of torch cannot, and for float32, which gains nothing.
    """
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
