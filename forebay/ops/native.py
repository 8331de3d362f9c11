"""The native CPU ops: thin calls into the compiled kernels.

A call costs about 2 us on top of its kernel, so nothing here looks at a tensor more often than it must.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.ops.interface import LinearWeight
from forebay.ops.reference import TorchOps

_PANEL = 32  # outputs, kPanel of cpu/linear.h
_STEP = 32  # inputs, kStep of cpu/linear.h

_P, _L = c_void_p, c_long
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_LINEAR = [_P, _P, _L, _P, _P, _P, _L, _L, _L]
_SIGNATURES: dict[str, list[Any]] = {
    "fb_pack_{}": [_P, _P, _P, _L, _L],
    "fb_linear_{}": _LINEAR,
    "fb_rms_norm_{}": [_P, _P, _L, _L, _L, _P, _P, _L, _L, c_float],
    "fb_add_rms_norm_{}": [_P, _P, _P, _P, _P, _L, _L, c_float],
    "fb_silu_and_mul_{}": [_P, _P, _L, _P, _L, _L],
    "fb_apply_rope_{}": [_P, _P, _L, _L, _P, _L, _L, _L, _P, _P, _L, _L],
    "fb_paged_attention_{}": [_P, _P, _L, _P, _P, _P, _L, _P, _P, _P, _L, _L, _L, _L, _L, c_float, _L, _P],
    "fb_combine_{}": [_P, _P, _P, _P, _P, _L, _L, _L],
    "fb_linear_bf16_f32": _LINEAR,
    "fb_store_kv": [_P, _P, _L, _P, _L, _P, _P, _P, _L, _L],
    "fb_embedding": [_P, _P, _P, _P, _L, _L],
    "fb_argmax_rows": [_P, _P, _P, _P, _L, _L],
    "fb_sample_rows": [_P, _P, _P, _P, _P, _P, _P, _P, _L, _L],
}


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinearWeight:
    """The layout is that of cpu/linear.h; `packed` and `bias` own the memory the kernels read."""

    packed: Tensor
    bias: Tensor
    packed_ptr: int
    bias_ptr: int
    in_features: int
    out_features: int
    kernel: Any
    kernel_f32: Any


class NativeOps(TorchOps):
    """Raises OSError if the library cannot be loaded, or if the operating system refuses the CPU's tile registers."""

    def __init__(self, path: Path, variant: str, num_threads: int) -> None:
        lib = ctypes.CDLL(str(path))
        if lib.fb_cpu_init() != 0:
            raise OSError(f"the operating system refuses the registers that the {variant} kernels need")
        self.name = f"native-{variant}"
        self.num_threads = num_threads
        lib.fb_pool_create.argtypes, lib.fb_pool_create.restype = [c_int], c_void_p
        lib.fb_pool_destroy.argtypes, lib.fb_pool_destroy.restype = [c_void_p], None
        self._pool = lib.fb_pool_create(num_threads)
        weakref.finalize(self, lib.fb_pool_destroy, self._pool)
        self._pack = _by_dtype(lib, "fb_pack_{}")
        self._linear = _by_dtype(lib, "fb_linear_{}")
        self._linear_f32 = {
            torch.float32: self._linear[torch.float32],
            torch.bfloat16: _bind(lib, "fb_linear_bf16_f32"),
        }
        self._rms_norm = _by_dtype(lib, "fb_rms_norm_{}")
        self._add_rms_norm = _by_dtype(lib, "fb_add_rms_norm_{}")
        self._silu_and_mul = _by_dtype(lib, "fb_silu_and_mul_{}")
        self._apply_rope = _by_dtype(lib, "fb_apply_rope_{}")
        self._paged_attention = _by_dtype(lib, "fb_paged_attention_{}")
        self._combine = _by_dtype(lib, "fb_combine_{}")
        self._store_kv = _bind(lib, "fb_store_kv")
        self._embedding = _bind(lib, "fb_embedding")
        self._argmax_rows = _bind(lib, "fb_argmax_rows")
        self._sample_rows = _bind(lib, "fb_sample_rows")

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinearWeight:
        weight = weight.contiguous()
        out_features, in_features = weight.shape
        width = -(-out_features // _PANEL) * _PANEL
        depth = in_features if weight.dtype == torch.float32 else -(-in_features // _STEP) * _STEP
        packed = torch.empty(width * depth, dtype=weight.dtype)
        self._pack[weight.dtype](self._pool, weight.data_ptr(), packed.data_ptr(), out_features, in_features)
        padded_bias = torch.zeros(width, dtype=torch.float32)
        if bias is not None:
            padded_bias[:out_features] = bias
        return NativeLinearWeight(
            packed,
            padded_bias,
            packed.data_ptr(),
            padded_bias.data_ptr(),
            in_features,
            out_features,
            self._linear[weight.dtype],
            self._linear_f32[weight.dtype],
        )

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, NativeLinearWeight), type(w)
        out = x.new_empty(x.shape[0], w.out_features)
        self._linear_into(w.kernel, x, w, out)
        return out

    def linear_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, NativeLinearWeight), type(w)
        out = torch.empty(x.shape[0], w.out_features, dtype=torch.float32)
        self._linear_into(w.kernel_f32, x, w, out)
        return out

    def _linear_into(self, kernel: Any, x: Tensor, w: NativeLinearWeight, out: Tensor) -> None:
        rows = x.shape[0]
        if rows:
            kernel(
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
        rows, width = x.shape
        n = width // 2
        out = x.new_empty(rows, n)
        self._silu_and_mul[x.dtype](self._pool, x.data_ptr(), x.stride(0), out.data_ptr(), rows, n)
        return out

    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        tokens, q_heads, head_dim = q.shape
        self._apply_rope[q.dtype](
            self._pool,
            q.data_ptr(),
            q.stride(0),
            q_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            tokens,
        )

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor) -> None:
        tokens, heads, head_dim = k.shape
        itemsize = k.itemsize
        self._store_kv(
            self._pool,
            k.data_ptr(),
            k.stride(0) * itemsize,
            v.data_ptr(),
            v.stride(0) * itemsize,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            loc.data_ptr(),
            tokens,
            heads * head_dim * itemsize,
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_lens: Tensor,
        page_size: int,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None or v_cache.shape != k_cache.shape:
            return super().paged_attention(
                q, k_cache, v_cache, page_table, rows, q_start, seq_lens, page_size, scale, sliding_window, sinks
            )
        tokens, q_heads, head_dim = q.shape
        out = q.new_empty(tokens, q_heads, head_dim)
        self._paged_attention[q.dtype](
            self._pool,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            rows.data_ptr(),
            q_start.data_ptr(),
            seq_lens.data_ptr(),
            rows.shape[0],
            page_size,
            q_heads,
            k_cache.shape[1],
            head_dim,
            scale,
            sliding_window,
            out.data_ptr(),
        )
        return out

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        rows, width = ids.shape[0], table.shape[1]
        out = table.new_empty(rows, width)
        self._embedding(self._pool, ids.data_ptr(), table.data_ptr(), out.data_ptr(), rows, width * table.itemsize)
        return out

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
                self._linear_into(last.kernel, hidden, last, results[start : start + count])
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


def _bind(lib: ctypes.CDLL, name: str, pattern: str | None = None) -> Any:
    function = getattr(lib, name)
    function.argtypes = _SIGNATURES[pattern or name]
    function.restype = None
    return function


def _by_dtype(lib: ctypes.CDLL, pattern: str) -> dict[torch.dtype, Any]:
    return {dtype: _bind(lib, pattern.format(suffix), pattern) for dtype, suffix in _SUFFIXES.items()}
