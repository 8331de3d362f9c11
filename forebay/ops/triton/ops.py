"""The ops of a GPU: Triton kernels, and what torch does as well."""

from __future__ import annotations

import torch

from forebay.ops.interface import Ops
from forebay.ops.triton.adapters import TritonAdapters
from forebay.ops.triton.attention import TritonAttention
from forebay.ops.triton.choices import Choices
from forebay.ops.triton.compression import TritonCompression
from forebay.ops.triton.experts import TritonExpertOps
from forebay.ops.triton.fallbacks import fall_back
from forebay.ops.triton.linear import TritonLinear
from forebay.ops.triton.pictures import TritonPictures
from forebay.ops.triton.recurrence import TritonRecurrence
from forebay.ops.triton.rowwise import TritonElementwise, TritonNorms
from forebay.ops.triton.sampling import TritonSampling
from forebay.ops.triton.selection import TritonSelection
from forebay.ops.triton.steps import TritonSteps
from forebay.ops.triton.streams import TritonStreams
from forebay.ops.triton.tiers import TritonTiers
from forebay.ops.weight_memory import WeightMemory


class TritonOps(Ops):
    """For tensors on `device`. An op without a kernel is the reference's own torch, which waits for the GPU nowhere
    either."""

    def __init__(
        self,
        device: torch.device | str,
        num_threads: int,
        choices: Choices | None = None,
        memory: WeightMemory | None = None,
        *,
        fp8_inputs: bool = False,
    ) -> None:
        super().__init__(num_threads, name="triton")
        self.fp8_inputs, self.memory = fp8_inputs, memory
        self.product_choices = {} if choices is None else choices.found
        self.linear = TritonLinear(torch.device(device), choices, memory, fp8_inputs=fp8_inputs)
        self.elementwise = TritonElementwise()
        self.norms = TritonNorms()
        self.experts = TritonExpertOps(self.linear, self.elementwise, fp8_inputs=fp8_inputs)
        self.adapters = TritonAdapters()
        self.attention = TritonAttention()
        self.selection = TritonSelection()
        self.tiers = TritonTiers()
        self.compression = TritonCompression()
        self.streams = TritonStreams()
        self.recurrence = TritonRecurrence()
        self.sampling = TritonSampling()
        self.steps = TritonSteps()
        self.pictures = TritonPictures()
        fall_back(self, self.fallbacks)
