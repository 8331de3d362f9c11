"""The native CPU ops: thin calls into the compiled kernels.

A call costs about 2 us on top of its kernel, so nothing here looks at a tensor more often than it must.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forebay.base.topology import Topology
from forebay.base.variants import AMX
from forebay.ops.interface import Ops
from forebay.ops.native.adapters import NativeAdapters
from forebay.ops.native.attention import NativeAttention
from forebay.ops.native.compression import NativeCompression
from forebay.ops.native.drafting import NativeDrafting
from forebay.ops.native.elementwise import NativeElementwise
from forebay.ops.native.experts import NativeExpertOps
from forebay.ops.native.kernels import Kernels, address
from forebay.ops.native.pictures import NativePictures
from forebay.ops.native.recurrence import NativeRecurrence
from forebay.ops.native.selection import NativeSelection
from forebay.ops.native.steps import NativeSteps
from forebay.ops.native.streams import NativeStreams
from forebay.ops.native.tiers import NativeTiers
from forebay.ops.reference.sampling import Draws
from forebay.ops.weight_memory import WeightMemory


class NativeOps(
    NativeExpertOps,
    NativeAdapters,
    NativeElementwise,
    NativeAttention,
    NativeSelection,
    NativeTiers,
    NativeCompression,
    NativeStreams,
    NativeRecurrence,
    NativeSteps,
    NativeDrafting,
    NativePictures,
    Ops,
):
    """Has a twin of every op. The kernels for AMX open quantized weights: they round no inputs, whatever
    `activation_bits` says. Raises what `Kernels` raises."""

    def __init__(
        self,
        path: Path,
        variant: str,
        num_threads: int,
        activation_bits: int = 16,
        memory: WeightMemory | None = None,
        topology: Topology | None = None,
    ) -> None:
        Ops.__init__(self, num_threads, name=f"native-{variant}")
        self.kernels = kernels = Kernels(path, variant, num_threads, topology)
        self.memory = memory = WeightMemory() if memory is None else memory
        NativeExpertOps.__init__(self, kernels, 0 if variant == AMX else activation_bits, memory)
        NativeAdapters.__init__(self, kernels)
        NativeElementwise.__init__(self, kernels)
        NativeAttention.__init__(self, kernels)
        NativeSelection.__init__(self, kernels)
        NativeTiers.__init__(self, kernels)
        NativeCompression.__init__(self, kernels)
        NativeStreams.__init__(self, kernels)
        NativeRecurrence.__init__(self, kernels)
        NativeSteps.__init__(self, kernels)
        NativeDrafting.__init__(self, kernels)
        NativePictures.__init__(self, kernels)
        self._rms_norm = kernels.by_dtype("fb_rms_norm_{}")
        self._layer_norm = kernels.by_dtype("fb_layer_norm_{}")
        self._add_rms_norm = kernels.by_dtype("fb_add_rms_norm_{}")
        self._finite_rows = kernels.by_dtype("fb_finite_rows_{}")
        self._argmax_rows = kernels.bind("fb_argmax_rows")
        self._mask_logits = kernels.bind("fb_mask_logits")
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

    def finite_rows(self, x: Tensor) -> Tensor:
        rows, n = x.shape
        finite = torch.empty(rows, dtype=torch.bool)
        self._finite_rows[x.dtype](self._pool, x.data_ptr(), finite.data_ptr(), rows, n)
        return finite

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._argmax_rows(self._pool, logits.data_ptr(), ids.data_ptr(), finite.data_ptr(), rows, n)
        return ids, finite

    def mask_logits(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        n, width = words.shape
        columns = logits.shape[1]
        self._mask_logits(self._pool, logits.data_ptr(), at.data_ptr(), words.data_ptr(), n, columns, width)

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        columns = map(address, draws)
        self._sample_rows(self._pool, logits.data_ptr(), *columns, ids.data_ptr(), rows, n)
        return ids
