"""Norms and activations: one program per row, or per part of one.

Shape letters: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.elementwise import ElementwiseOps
from forebay.ops.reference.norms import GatedNorm, NormOps
from forebay.ops.triton.launch import kernel

_BLOCK: Final = 1024  # entries of a row that one program activates

_SILU: Final = 0
_GELU_TANH: Final = 1
_GELU_ERF: Final = 2
_CLAMPED_SWIGLU: Final = 3
_RELU2: Final = 4
_MUL_SIGMOID: Final = 5
_MUL_SILU: Final = 6
_PLAIN_GELU_TANH: Final = 7
_PLAIN_GELU_ERF: Final = 8
_XIELU: Final = 9


@kernel
@triton.jit
def _rms_norm(x, weight, out, inner, outer_stride, inner_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    values = tl.load(x + row // inner * outer_stride + row % inner * inner_stride + at, mask=live, other=0.0)
    values = values.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / n + eps)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (values * scale).to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _add_rms_norm(x, residual, weight, out, x_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    added = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    kept = tl.load(residual + row * n + at, mask=live, other=0.0).to(tl.float32)
    rounded = (kept + added).to(residual.dtype.element_ty)
    tl.store(residual + row * n + at, rounded, mask=live)
    values = rounded.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / n + eps)
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (values * scale).to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _layer_norm(
    x,
    weight,
    bias,
    out,
    inner,
    outer_stride,
    inner_stride,
    own_stride,
    n,
    eps,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < n
    values = tl.load(x + row // inner * outer_stride + row % inner * inner_stride + at, mask=live, other=0.0)
    values = values.to(tl.float32)
    values = tl.where(live, values - tl.sum(values, 0) / n, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / n + eps)
    own = row % inner * own_stride + at
    values *= tl.load(weight + own, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + own, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, values.to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _gated_rms_norm(
    x,
    gate,
    weight,
    out,
    x_stride,
    gate_stride,
    width,
    eps,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize one group of one row; SHARED: one weight for all groups."""
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    live = inside < GROUP
    at = tl.program_id(1) * GROUP + inside
    values = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + at, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        opened = tl.sigmoid(opened)
    else:
        opened *= tl.sigmoid(opened)
    if not NORM_FIRST:
        values *= opened
    values *= tl.rsqrt(tl.sum(values * values, 0) / GROUP + eps)
    values *= tl.load(weight + (inside if SHARED else at), mask=live, other=0.0).to(tl.float32)
    if NORM_FIRST:
        values *= opened
    tl.store(out + row * width + at, values.to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _activate(
    x,
    other,
    out,
    x_stride,
    other_stride,
    n,
    alpha,
    limit,
    offset,
    eps,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x is the gate and `other` what it opens, but the other way about in _MUL_SIGMOID and _MUL_SILU; SHARED entries
    side by side have one entry of `other`. An xIELU has its alphas in `alpha` and `limit`, and beta in `offset`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    a = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(other + row * other_stride + at // SHARED, mask=live, other=0.0).to(tl.float32)
    if KIND == 0:
        a = a * tl.sigmoid(a) * b
    elif KIND == 1:
        # 0.5 * (1 + tanh(z)) is sigmoid(2z)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a)) * b
    elif KIND == 2:
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476)) * b
    elif KIND == 3:
        a = tl.minimum(a, limit, propagate_nan=tl.PropagateNan.ALL)
        b = tl.clamp(b, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        a = (b + offset) * a * tl.sigmoid(alpha * a)
    elif KIND == 4:
        a = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
        a = a * a
    elif KIND == 5:
        a = a * tl.sigmoid(b)
    elif KIND == 6:
        a = a * b * tl.sigmoid(b)
    elif KIND == 7:
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif KIND == 8:
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    else:
        y = tl.minimum(a, eps)
        near = tl.maximum(y, -0.5)  # exp(near) - 1 by Taylor: near 0 it would cancel
        p = 1.0 + near * (0.5 + near * (1.0 / 6 + near * (1.0 / 24 + near * (1.0 / 120 + near * (1.0 / 720)))))
        far = tl.exp(y - near)
        a = offset * a + tl.where(a > 0, alpha * a * a, limit * (far * near * p + (far - 1.0) - a))
    tl.store(out + row * n + at, a.to(out.dtype.element_ty), mask=live)


@kernel
@triton.jit
def _scale_rows(x, table, rows, x_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    place = x + row * x_stride + at
    factor = tl.load(table + tl.load(rows + row))
    values = tl.load(place, mask=live, other=0.0).to(tl.float32) * factor
    tl.store(place, values.to(x.dtype.element_ty), mask=live)


class TritonNorms(NormOps):
    """See `NormOps`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `NormOps.rms_norm`, for x of two or three dimensions with a contiguous last one."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = x.shape[-1]
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        grid = (x.shape[0] * inner,)
        _rms_norm[grid](
            x,
            weight,
            out,
            inner,
            x.stride(0),
            inner_stride,
            n,
            eps,
            BLOCK=triton.next_power_of_2(n),
            num_warps=_warps(n),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `NormOps.add_rms_norm`: `residual` is updated in place, and a new tensor has the norm."""
        n = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _add_rms_norm[(x.shape[0],)](
            x, residual, weight, out, x.stride(0), n, eps, BLOCK=triton.next_power_of_2(n), num_warps=_warps(n)
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """As `NormOps.layer_norm`, for x with a contiguous last dimension."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = x.shape[-1]
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        _layer_norm[(x.shape[0] * inner,)](
            x,
            weight,
            bias,
            out,
            inner,
            x.stride(0),
            inner_stride,
            n if weight.dim() == 2 else 0,
            n,
            eps,
            HAS_BIAS=bias is not None,
            BLOCK=triton.next_power_of_2(n),
            num_warps=_warps(n),
        )
        return out

    def gated_rms_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        """As `NormOps.gated_rms_norm`, by one program for each group of each row."""
        width, group_size = x.shape[1], norm.group_size
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _gated_rms_norm[(x.shape[0], width // group_size)](
            x,
            gate,
            norm.weight,
            out,
            x.stride(0),
            gate.stride(0),
            width,
            norm.eps,
            GROUP=group_size,
            SHARED=norm.weight.shape[0] != width,
            NORM_FIRST=norm.norm_first,
            SIGMOID=norm.sigmoid,
            BLOCK=triton.next_power_of_2(group_size),
            num_warps=_warps(group_size),
        )
        return out


class TritonElementwise(ElementwiseOps):
    """See `ElementwiseOps`."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return _gated(x, _SILU)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return _gated(x, _GELU_ERF if exact else _GELU_TANH)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
        return _gated(x, _CLAMPED_SWIGLU, alpha, limit, offset)

    def relu2(self, x: Tensor) -> Tensor:
        return _activated(x, x, _RELU2)

    def xielu(self, x: Tensor, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
        return _activated(x, x, _XIELU, alpha_p, alpha_n, beta, eps)

    def gelu(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return _activated(x, x, _PLAIN_GELU_ERF if exact else _PLAIN_GELU_TANH)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return _activated(x, gate, _MUL_SIGMOID)

    def mul_silu(self, x: Tensor, gate: Tensor) -> Tensor:
        return _activated(x, gate, _MUL_SILU)

    def scale_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        num_rows, n = x.shape
        _scale_rows[(num_rows, triton.cdiv(n, _BLOCK))](x, table, rows, x.stride(0), n, BLOCK=_BLOCK)
        return x


def _gated(x: Tensor, kind: int, *parameters: float) -> Tensor:
    half = x.shape[1] // 2
    return _activated(x[:, :half], x[:, half:], kind, *parameters)


def _activated(
    x: Tensor, other: Tensor, kind: int, alpha: float = 0.0, limit: float = 0.0, offset: float = 0.0, eps: float = 0.0
) -> Tensor:
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _activate[(rows, triton.cdiv(n, _BLOCK))](
        x,
        other,
        out,
        x.stride(0),
        other.stride(0),
        n,
        alpha,
        limit,
        offset,
        eps,
        KIND=kind,
        SHARED=n // other.shape[1],
        BLOCK=_BLOCK,
    )
    return out


def _warps(n: int) -> int:
    """A thread has about 16 entries of a row."""
    return min(16, max(1, triton.next_power_of_2(n) // 512))
