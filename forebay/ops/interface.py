"""The ops of every backend, each defined in torch. The native twins are tested against the definition, which also runs
if there is no native twin.

Shape letters: T tokens, S sequences, H hidden size, I intermediate size, N and K a linear layer's outputs and inputs;
Hq query heads, Hk KV heads, D head size, R rotary size, P pages per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forebay.ops.reference.adapters import AdapterOps
from forebay.ops.reference.attention import AttentionOps
from forebay.ops.reference.compression import CompressionOps
from forebay.ops.reference.drafting import DraftingOps
from forebay.ops.reference.experts import ExpertOps
from forebay.ops.reference.pictures import PictureOps
from forebay.ops.reference.recurrence import RecurrenceOps
from forebay.ops.reference.sampling import Draws, sample_rows
from forebay.ops.reference.selection import SelectionOps
from forebay.ops.reference.steps import StepOps
from forebay.ops.reference.streams import StreamOps
from forebay.ops.reference.tiers import TierOps
from forebay.ops.weight_memory import WeightMemory


class ProductChoice(Protocol):
    """The library or kernel that computes the products of a shape, and the reason."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...


class Ops(
    ExpertOps,
    AdapterOps,
    AttentionOps,
    SelectionOps,
    TierOps,
    CompressionOps,
    StreamOps,
    RecurrenceOps,
    StepOps,
    DraftingOps,
    PictureOps,
):
    """The kernels of one backend: nothing in it changes once made. Not safe to call from two threads at once, nor in a
    child that was forked (its worker threads stay behind): make one per process. By itself it is the torch backend.

    `name` names the kernels in the start-up report: `torch`, `native-avx2`, `native-amx`, `triton`. Inputs of weights
    in codes are rounded to `activation_bits`; with 0 they stay as they are.
    """

    memory: WeightMemory | None = None  # where weights are packed; None: wherever torch puts them

    def __init__(self, num_threads: int, activation_bits: int = 0, name: str = "torch") -> None:
        self.num_threads = num_threads
        self.activation_bits = activation_bits
        self.name = name
        self.product_choices: Mapping[str, ProductChoice] = {}  # of dense weights, by type and shape
        self.fp8_inputs = False  # of weights in FP8
        self.fallbacks: dict[str, str] = {}  # by op that torch computes since its kernel does not compile: the reason

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, [.., H] -> the same shape, contiguous.

        Computed in float32 and rounded once. x has two or three dimensions.
        """
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * normed).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias over the last dimension, [T, H] or [T, N, H] -> the same
        shape, contiguous; no bias for None.

        weight and bias [H], or of three dimensions [N, H]: each of N heads has its own. Computed in float32 and rounded
        once. Layer normalization, arXiv 1607.06450, section 3.
        """
        normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, then `rms_norm` of the sum as it was rounded into residual."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def finite_rows(self, x: Tensor) -> Tensor:
        """x [T, H] contiguous -> [T] bool: False for a row with a NaN or an infinity."""
        return x.isfinite().all(dim=-1)

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, V] float32 -> ids [S] int64 of each row's first maximum, and finite [S] bool.

        A row with a NaN or +inf, or with nothing but -inf, is not finite; its id is 0.
        """
        if logits.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        top = logits.amax(dim=-1)  # NaN if any entry is
        finite = top.isfinite()
        first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)
        return torch.where(finite, first, torch.zeros_like(first)), finite

    def mask_logits(self, logits: Tensor, at: Tensor, words: Tensor) -> None:
        """logits [S, V] float32 become -inf in place, in row at[n] where bit j % 32 of words[n, j // 32] is not set.

        at [N] int64, each row once; words [N, V / 32, rounded up] int32, contiguous.
        """
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        may = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[at] = logits[at].masked_fill(~may, -torch.inf)

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw one token per row of logits [S, V] float32 -> ids [S] int64, as `ops/reference/sampling.py` defines it;
        0 for a row that is not finite."""
        return sample_rows(logits, draws)
