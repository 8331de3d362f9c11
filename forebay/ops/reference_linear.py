"""The definition of the ops in linear.py, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.formats.quantized import GROUP, GroupQuantized
from forebay.ops.linear import LinearWeight

_SMALLEST = 1e-30  # kSmallest of cpu/quantize.h


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
    """codes [N, K // 32, 32] int8, the zero taken off; scales and minimums [N, K // 32] float32."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.scales.shape[1] * GROUP

    @property
    def out_features(self) -> int:
        return len(self.scales)


class TorchLinear:
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        out_features, in_features = weight.shape
        packed = _prepack(weight)
        kept = weight.clone() if packed is None else None
        return TorchLinearWeight(kept, packed, None if bias is None else bias.clone(), in_features, out_features)

    def pack_quantized(self, weight: GroupQuantized, bias: Tensor | None = None) -> LinearWeight:
        codes = torch.tensor(weight.codes).view(*weight.scales.shape, -1)
        if weight.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        scales = torch.tensor(weight.scales).float()
        minimums = torch.zeros_like(scales) if weight.minimums is None else torch.tensor(weight.minimums).float()
        signed = (codes.short() - weight.zero).to(torch.int8)
        return TorchQuantizedWeight(signed, scales, minimums, None if bias is None else bias.float())

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TorchQuantizedWeight):
            return _quantized_linear(x, w).to(x.dtype)
        assert isinstance(w, TorchLinearWeight), type(w)
        if w.packed is None or x.shape[0] == 0:
            weight = x.new_zeros(w.out_features, w.in_features) if w.weight is None else w.weight
            return F.linear(x, weight, w.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.packed, w.bias, "none", [], "")
        return out

    def linear_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        return _quantized_linear(x, w) if isinstance(w, TorchQuantizedWeight) else self.linear(x, w).float()

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, TorchQuantizedWeight), type(table)
        rows = table.scales[ids].unsqueeze(-1) * table.codes[ids] + table.minimums[ids].unsqueeze(-1)
        return rows.flatten(1).to(dtype)


def _quantized_linear(x: Tensor, w: TorchQuantizedWeight) -> Tensor:
    codes, scales = _quantize(x)
    sums = scales * codes.sum(dim=-1)
    out = torch.zeros(len(x), w.out_features)
    for g in range(w.scales.shape[1]):
        dots = codes[:, g] @ w.codes[:, g].float().T  # integers below 2^24: exact
        out += scales[:, g, None] * w.scales[:, g] * dots
        out += sums[:, g, None] * w.minimums[:, g]
    return out if w.bias is None else out + w.bias


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K // 32, 32] and scales [T, K // 32], float32."""
    values = x.float().reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = values.abs().amax(dim=-1)
    counts = largest.isfinite() & (largest >= _SMALLEST)
    inverse = torch.where(counts, torch.tensor(127.0) / largest, 0)  # 127 / tensor would round twice
    codes = torch.where(counts.unsqueeze(-1), (values * inverse.unsqueeze(-1)).round(), 0)
    scales = torch.where(counts, largest / 127, 0).masked_fill(~largest.isfinite(), float("nan"))
    return codes, scales


def _prepack(weight: Tensor) -> Tensor | None:
    """oneDNN re-packs a bfloat16 weight at every F.linear: doing it once is 3 times faster at 1 to 16 rows.

    None where this build of torch cannot, and for float32, where it does not pay.
    """
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
