"""The ops for NVIDIA GPUs: Triton kernels, and torch where that is as fast. Imported only where they were chosen; CUDA
builds of torch bring Triton along.

All of it can be captured in a CUDA graph: grids follow from shapes, and whatever varies between replays (lengths, rows,
slots, ids) is read by the kernels from the tensors that they were given. Kernels have one fixed configuration for given
shapes, so nothing is tuned while a step runs.
"""

from __future__ import annotations

from forebay.ops.triton.ops import TritonOps

__all__ = ["TritonOps"]
