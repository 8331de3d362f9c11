"""The native twins of the ops in elementwise.py: thin calls into the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels
from forebay.ops.reference.elementwise import ElementwiseOps


class NativeElementwise(ElementwiseOps):
    """See `ElementwiseOps`. The last dimension of every tensor is contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._silu_and_mul = kernels.by_dtype("fb_silu_and_mul_{}")
        self._gelu_and_mul = kernels.by_dtype("fb_gelu_and_mul_{}")
        self._sparse_gelu_and_mul = kernels.by_dtype("fb_sparse_gelu_and_mul_{}")
        self._clamped_swiglu = kernels.by_dtype("fb_clamped_swiglu_{}")
        self._relu2 = kernels.by_dtype("fb_relu2_{}")
        self._xielu = kernels.by_dtype("fb_xielu_{}")
        self._gelu = kernels.by_dtype("fb_gelu_{}")
        self._mul = kernels.by_dtype("fb_mul_{}")
        self._mul_silu = kernels.by_dtype("fb_mul_silu_{}")
        self._mul_sigmoid = kernels.by_dtype("fb_mul_sigmoid_{}")
        self._add = kernels.by_dtype("fb_add_{}")
        self._scale = kernels.by_dtype("fb_scale_{}")
        self._scale_rows = kernels.by_dtype("fb_scale_rows_{}")
        self._narrow = kernels.bind("fb_narrow")
        self._softcap = kernels.bind("fb_softcap")
        self._fill = kernels.bind("fb_fill")
        self._copy_blocks = kernels.bind("fb_copy_blocks")

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._silu_and_mul[x.dtype], x)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return self._gate(self._gelu_and_mul[x.dtype], x, exact)

    def sparse_gelu_and_mul(self, x: Tensor, *, deviations: float) -> Tensor:
        return self._gate(self._sparse_gelu_and_mul[x.dtype], x, deviations)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
        return self._gate(self._clamped_swiglu[x.dtype], x, alpha, limit, offset)

    def _gate(self, kernel: Any, x: Tensor, *parameters: float) -> Tensor:
        """x [T, 2I] -> [T, I]."""
        rows, width = x.shape
        n = width // 2
        out = x.new_empty(rows, n)
        kernel(self._pool, x.data_ptr(), x.stride(0), out.data_ptr(), rows, n, *parameters)
        return out

    def relu2(self, x: Tensor) -> Tensor:
        return self._map(self._relu2[x.dtype], x)

    def xielu(self, x: Tensor, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
        return self._map(self._xielu[x.dtype], x, alpha_p, alpha_n, beta, eps)

    def gelu(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return self._map(self._gelu[x.dtype], x, exact)

    def _map(self, kernel: Any, x: Tensor, *parameters: float) -> Tensor:
        """x [T, I] -> [T, I]."""
        rows, n = x.shape
        out = x.new_empty(rows, n)
        kernel(self._pool, x.data_ptr(), x.stride(0), out.data_ptr(), rows, n, *parameters)
        return out

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return self._zip(self._mul[x.dtype], x, y)

    def mul_silu(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._zip(self._mul_silu[x.dtype], x, gate)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._zip(self._mul_sigmoid[x.dtype], x, gate, gate.shape[1])

    def _zip(self, kernel: Any, x: Tensor, y: Tensor, *parameters: int) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        kernel(
            self._pool, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), out.data_ptr(), n, rows, n, *parameters
        )
        return out

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        rows, n = x.shape
        at = x.data_ptr()
        self._add[x.dtype](self._pool, at, x.stride(0), y.data_ptr(), y.stride(0), at, x.stride(0), rows, n)
        return x

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        self._scale[x.dtype](self._pool, x.data_ptr(), x.shape[0], x.stride(0), factor)
        return x

    def scale_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        places = x.data_ptr(), x.stride(0), table.data_ptr(), rows.data_ptr()
        self._scale_rows[x.dtype](self._pool, *places, *x.shape)
        return x

    def softcap_(self, x: Tensor, cap: float) -> Tensor:
        self._softcap(self._pool, x.data_ptr(), x.shape[0], x.stride(0), cap)
        return x

    def narrow(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == x.dtype:
            return x
        assert (x.dtype, dtype) == (torch.float32, torch.bfloat16), (x.dtype, dtype)
        out = torch.empty(x.shape, dtype=dtype)
        self._narrow(self._pool, x.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def zeros_like(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._fill(self._pool, out.data_ptr(), out.numel(), out.itemsize, 0)
        return out

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        out = parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
        first = 0
        for part in parts:
            self._copy_into(out[..., first : first + part.shape[-1]], part)
            first += part.shape[-1]
        return out

    def _copy_into(self, out: Tensor, x: Tensor) -> None:
        """Copy a tensor of two or three dimensions."""
        size = x.itemsize
        inner = x.shape[1] if x.dim() == 3 else 1
        strides = [stride * size for t in (out, x) for stride in (t.stride(0), t.stride(1) if t.dim() == 3 else 0)]
        self._copy_blocks(self._pool, out.data_ptr(), x.data_ptr(), *strides, x.shape[0], inner, x.shape[-1] * size)
