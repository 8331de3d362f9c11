"""The native twin of the op in adapters.py: a thin call into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels
from forebay.ops.reference.adapters import AdapterOps, AdapterTable


class NativeAdapters(AdapterOps):
    """See `AdapterOps`. The last dimension of x is contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        own = kernels.by_dtype("fb_add_adapters_{}")
        widened = kernels.bind("fb_add_adapters_f32_of_bf16")
        self._add_adapters = {(dtype, dtype): kernel for dtype, kernel in own.items()}
        self._add_adapters[torch.float32, torch.bfloat16] = widened

    def add(self, out: Tensor, x: Tensor, slots: Tensor, table: AdapterTable) -> None:
        rows, inputs = x.shape
        num_slots, layers, rank, _ = table.a.shape
        num_panels, outputs = len(table.panels), out.shape[1]
        parts = (part.data_ptr() for part in (table.a, table.b, table.ranks, table.panels))
        given = out.data_ptr(), x.data_ptr(), x.stride(0), slots.data_ptr()
        sizes = (rows, inputs, outputs, num_slots, layers, rank, num_panels)
        self._add_adapters[x.dtype, table.a.dtype](self._pool, *given, *parts, *sizes)
