"""The table of the ops of a backend, in groups by concern. By itself it has the definitions in torch (reference/),
against which the groups of other backends are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from forebay.ops.linear import LinearOps
from forebay.ops.reference.adapters import AdapterOps
from forebay.ops.reference.attention import AttentionOps
from forebay.ops.reference.compression import CompressionOps
from forebay.ops.reference.drafting import DraftingOps
from forebay.ops.reference.elementwise import ElementwiseOps
from forebay.ops.reference.experts import ExpertOps
from forebay.ops.reference.linear import TorchLinear
from forebay.ops.reference.norms import NormOps
from forebay.ops.reference.pictures import PictureOps
from forebay.ops.reference.recurrence import RecurrenceOps
from forebay.ops.reference.sampling import SamplingOps
from forebay.ops.reference.selection import SelectionOps
from forebay.ops.reference.steps import StepOps
from forebay.ops.reference.streams import StreamOps
from forebay.ops.reference.tables import TableOps
from forebay.ops.reference.tiers import TierOps
from forebay.ops.weight_memory import WeightMemory


class ProductChoice(Protocol):
    """The library or kernel that computes the products of a shape, and the reason."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...


class Ops:
    """The kernels of one backend: nothing in it changes once made. Not safe to call from two threads at once, nor in a
    child that was forked (its worker threads stay behind): make one per process. By itself it is the torch backend.

    `name` names the kernels in the start-up report: `torch`, `native-avx2`, `native-amx`, `triton`. Inputs of weights
    in codes are rounded to `activation_bits`; with 0 they stay as they are. A group of ops works
    by itself, too.
    """

    memory: WeightMemory | None = None  # where weights are packed; None: wherever torch puts them

    def __init__(self, num_threads: int, activation_bits: int = 0, name: str = "torch") -> None:
        self.num_threads = num_threads
        self.activation_bits = activation_bits
        self.name = name
        self.product_choices: Mapping[str, ProductChoice] = {}  # of dense weights, by type and shape
        self.fp8_inputs = False  # of weights in FP8
        self.fallbacks: dict[str, str] = {}  # by op that torch computes since its kernel does not compile: the reason
        self.linear: LinearOps = TorchLinear(activation_bits)
        self.elementwise = ElementwiseOps()
        self.norms = NormOps()
        self.experts = ExpertOps(self.linear, self.elementwise)
        self.adapters = AdapterOps()
        self.attention = AttentionOps()
        self.selection = SelectionOps()
        self.tiers = TierOps()
        self.compression = CompressionOps()
        self.streams = StreamOps()
        self.tables = TableOps()
        self.recurrence = RecurrenceOps()
        self.sampling = SamplingOps()
        self.steps = StepOps()
        self.drafting = DraftingOps()
        self.pictures = PictureOps()
