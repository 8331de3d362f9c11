"""The native twins of the ops in norms.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.native.kernels import Kernels, address, view
from forebay.ops.reference.norms import GatedNorm, NormOps


class NativeNorms(NormOps):
    """See `NormOps`. The last dimension of every tensor is contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._rms_norm = kernels.by_dtype("fb_rms_norm_{}")
        self._layer_norm = kernels.by_dtype("fb_layer_norm_{}")
        self._add_rms_norm = kernels.by_dtype("fb_add_rms_norm_{}")
        self._match_rms = kernels.by_dtype("fb_match_rms_{}")
        self._gated_rms_norm = kernels.by_dtype("fb_gated_rms_norm_{}")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() == 3:
            outer, inner, n = x.shape
            out = x.new_empty(outer, inner, n)
            outer_stride, inner_stride, _ = x.stride()
        else:
            outer, n = x.shape
            out = x.new_empty(outer, n)
            inner, inner_stride, outer_stride = 1, 0, x.stride(0)
        rows = (x.data_ptr(), outer_stride, inner, inner_stride)
        self._rms_norm[x.dtype](self._pool, *rows, weight.data_ptr(), out.data_ptr(), outer * inner, n, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, n = x.new_empty(x.shape), x.shape[-1]
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        rows = (x.data_ptr(), x.stride(0), inner, inner_stride)
        own = (weight.data_ptr(), address(bias), n if weight.dim() == 2 else 0)
        self._layer_norm[x.dtype](self._pool, *rows, *own, out.data_ptr(), x.shape[0] * inner, n, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._add_rms_norm[x.dtype](
            self._pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps
        )
        return out

    def match_rms(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._match_rms[x.dtype](self._pool, *view(x), *view(like), out.data_ptr(), rows, n, least)
        return out

    def gated_rms_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        (rows, n), size = x.shape, norm.group_size
        out = x.new_empty(rows, n)
        tensors = (*view(x), *view(gate), norm.weight.data_ptr(), out.data_ptr())
        sizes = (rows, n, size, 0 if norm.weight.shape[0] == size else size)
        self._gated_rms_norm[x.dtype](self._pool, *tensors, *sizes, norm.eps, norm.norm_first, norm.sigmoid)
        return out
