"""The ops for NVIDIA GPUs: Triton kernels, and torch if it is as fast. Imported only if they were chosen; CUDA builds
of torch bring Triton along.

All of it can be captured in a CUDA graph: grids follow from shapes, and values that vary between replays (lengths,
rows, slots, ids) are read by the kernels from their tensors. Kernels have one fixed configuration for given shapes, so
nothing is tuned while a step runs.
"""

from __future__ import annotations

from forebay.ops.triton.ops import TritonOps

__all__ = ["TritonOps"]
