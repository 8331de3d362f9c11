"""The native CPU ops: thin calls into the compiled kernels.

A call costs about 2 us on top of its kernel, so nothing here looks at a tensor more often than it must.
"""

from __future__ import annotations

from pathlib import Path

from forebay.base.topology import Topology
from forebay.base.variants import AMX
from forebay.ops.interface import Ops
from forebay.ops.native.adapters import NativeAdapters
from forebay.ops.native.attention import NativeAttention
from forebay.ops.native.compression import NativeCompression
from forebay.ops.native.drafting import NativeDrafting
from forebay.ops.native.elementwise import NativeElementwise
from forebay.ops.native.experts import NativeExpertOps
from forebay.ops.native.kernels import Kernels
from forebay.ops.native.linear import NativeLinear
from forebay.ops.native.norms import NativeNorms
from forebay.ops.native.pictures import NativePictures
from forebay.ops.native.recurrence import NativeRecurrence
from forebay.ops.native.sampling import NativeSampling
from forebay.ops.native.selection import NativeSelection
from forebay.ops.native.steps import NativeSteps
from forebay.ops.native.streams import NativeStreams
from forebay.ops.native.tables import NativeTables
from forebay.ops.native.tiers import NativeTiers
from forebay.ops.weight_memory import WeightMemory


class NativeOps(Ops):
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
        bits = 0 if variant == AMX else activation_bits
        super().__init__(num_threads, bits, f"native-{variant}")
        self.kernels = kernels = Kernels(path, variant, num_threads, topology)
        self.memory = memory = WeightMemory() if memory is None else memory
        self.linear = NativeLinear(kernels, bits, memory)
        self.elementwise = NativeElementwise(kernels)
        self.norms = NativeNorms(kernels)
        self.experts = NativeExpertOps(kernels, self.linear, self.elementwise)
        self.adapters = NativeAdapters(kernels)
        self.attention = NativeAttention(kernels)
        self.selection = NativeSelection(kernels)
        self.tiers = NativeTiers(kernels)
        self.compression = NativeCompression(kernels)
        self.streams = NativeStreams(kernels)
        self.tables = NativeTables(kernels)
        self.recurrence = NativeRecurrence(kernels)
        self.sampling = NativeSampling(kernels)
        self.steps = NativeSteps(kernels)
        self.drafting = NativeDrafting(kernels)
        self.pictures = NativePictures(kernels)
