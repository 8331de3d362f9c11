"""The ops of a GPU: Triton kernels, and what torch does as well."""

from __future__ import annotations

import torch

from forebay.ops.reference import TorchOps
from forebay.ops.triton.attention import TritonAttention
from forebay.ops.triton.experts import TritonExpertOps
from forebay.ops.triton.linear import TritonLinear
from forebay.ops.triton.recurrence import TritonRecurrence
from forebay.ops.triton.rowwise import TritonRowwise
from forebay.ops.triton.sampling import TritonSampling


class TritonOps(
    TritonLinear, TritonRowwise, TritonExpertOps, TritonAttention, TritonRecurrence, TritonSampling, TorchOps
):
    """For tensors on `device`. What no class before `TorchOps` has is the reference's own torch, which waits for the
    GPU nowhere either."""

    def __init__(self, device: torch.device | str, num_threads: int) -> None:
        TorchOps.__init__(self, num_threads)
        TritonLinear.__init__(self, torch.device(device))
        self.name = "triton"
