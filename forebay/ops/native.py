"""The native CPU ops: thin calls into the compiled kernels.

A call costs about 2 us on top of its kernel, so nothing here looks at a tensor more often than it must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.ops.kernels import Kernels
from forebay.ops.linear import LinearWeight
from forebay.ops.native_attention import NativeAttention
from forebay.ops.native_linear import NativeLinear, NativeLinearWeight
from forebay.ops.native_recurrence import NativeRecurrence


class NativeOps(NativeLinear, NativeAttention, NativeRecurrence):
    """Raises what `Kernels` raises."""

    def __init__(self, path: Path, variant: str, num_threads: int) -> None:
        self.name = f"native-{variant}"
        self.num_threads = num_threads
        self.kernels = kernels = Kernels(path, variant, num_threads)
        NativeLinear.__init__(self, kernels)
        NativeAttention.__init__(self, kernels)
        NativeRecurrence.__init__(self, kernels)
        self._rms_norm = kernels.by_dtype("fb_rms_norm_{}")
        self._add_rms_norm = kernels.by_dtype("fb_add_rms_norm_{}")
        self._silu_and_mul = kernels.by_dtype("fb_silu_and_mul_{}")
        self._gelu_and_mul = kernels.by_dtype("fb_gelu_and_mul_{}")
        self._clamped_swiglu = kernels.by_dtype("fb_clamped_swiglu_{}")
        self._relu2 = kernels.by_dtype("fb_relu2_{}")
        self._mul_sigmoid = kernels.by_dtype("fb_mul_sigmoid_{}")
        self._mul_softplus = kernels.by_dtype("fb_mul_softplus_{}")
        self._combine = kernels.by_dtype("fb_combine_{}")
        self._gather = kernels.bind("fb_gather")
        self._scatter = kernels.bind("fb_scatter")
        self._argmax_rows = kernels.bind("fb_argmax_rows")
        self._sample_rows = kernels.bind("fb_sample_rows")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() == 3:
            outer, inner, n = x.shape
            out = x.new_empty(outer, inner, n)
            outer_stride, inner_stride, _ = x.stride()
        else:
            outer, n = x.shape
            out = x.new_empty(outer, n)
            inner, inner_stride, outer_stride = 1, 0, x.stride(0)
        self._rms_norm[x.dtype](
            self._pool,
            x.data_ptr(),
            outer_stride,
            inner,
            inner_stride,
            weight.data_ptr(),
            out.data_ptr(),
            outer * inner,
            n,
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._add_rms_norm[x.dtype](
            self._pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._silu_and_mul[x.dtype], x)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return self._gate(self._gelu_and_mul[x.dtype], x, exact)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float) -> Tensor:
        return self._gate(self._clamped_swiglu[x.dtype], x, alpha, limit)

    def _gate(self, kernel: Any, x: Tensor, *parameters: float) -> Tensor:
        """x [T, 2I] -> [T, I]."""
        rows, width = x.shape
        n = width // 2
        out = x.new_empty(rows, n)
        kernel(self._pool, x.data_ptr(), x.stride(0), out.data_ptr(), rows, n, *parameters)
        return out

    def relu2(self, x: Tensor) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._relu2[x.dtype](self._pool, x.data_ptr(), x.stride(0), out.data_ptr(), rows, n)
        return out

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        rows, n = x.shape
        out = x.new_empty(rows, n)
        self._mul_sigmoid[x.dtype](
            self._pool, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), out.data_ptr(), rows, n
        )
        return out

    def mul_softplus(self, scale: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        rows, n = x.shape
        out = torch.empty(rows, n)
        self._mul_softplus[x.dtype](
            self._pool, scale.data_ptr(), x.data_ptr(), x.stride(0), bias.data_ptr(), out.data_ptr(), rows, n
        )
        return out

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        self._gather(self._pool, table.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0])
        return out

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        self._scatter(self._pool, table.data_ptr(), rows.data_ptr(), values.data_ptr(), rows.shape[0])

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._argmax_rows(self._pool, logits.data_ptr(), ids.data_ptr(), finite.data_ptr(), rows, n)
        return ids, finite

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniform: Tensor,
    ) -> Tensor:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._sample_rows(
            self._pool,
            logits.data_ptr(),
            temperature.data_ptr(),
            *(None if column is None else column.data_ptr() for column in (top_k, top_p, min_p)),
            uniform.data_ptr(),
            ids.data_ptr(),
            rows,
            n,
        )
        return ids

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        topk_ids: Tensor,
        topk_weights: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        activate = activate or self.silu_and_mul
        tokens, choices = topk_ids.shape
        chosen = topk_ids.reshape(-1)
        by_expert = chosen.argsort(stable=True)
        gathered = x[by_expert // choices]
        results = torch.empty_like(gathered)
        start = 0
        for e, count in enumerate(chosen.bincount(minlength=len(gate_up)).tolist()):
            if count:
                last = down[e]
                assert isinstance(last, NativeLinearWeight), type(last)
                hidden = activate(self.linear(gathered[start : start + count], gate_up[e]))
                self._linear_into(hidden, last, results[start : start + count])
                start += count
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(tokens * choices)
        weights = topk_weights.float().contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._combine[x.dtype](
            self._pool,
            results.data_ptr(),
            place.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            tokens,
            choices,
            x.shape[1],
        )
        return out
