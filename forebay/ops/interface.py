"""What each op does, for every backend.

Shape letters: T tokens, S sequences, H hidden size, I intermediate size, N and K a linear layer's outputs and inputs,
Hq query heads, Hk KV heads, D head size, R rotary size, P pages per row, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from forebay.ops.attention import AttentionOps
from forebay.ops.elementwise import ElementwiseOps
from forebay.ops.experts import ExpertOps
from forebay.ops.linear import LinearOps
from forebay.ops.recurrence import RecurrenceOps


class Draws(NamedTuple):
    """How a token of each row is drawn: temperature, top_p and min_p [S] float32, top_k [S] int64, uniform [S] float64
    of [0, 1). top_k 0, top_p 1 and min_p 0 keep all, and None stands for such a column."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    uniform: Tensor


class Ops(LinearOps, ExpertOps, ElementwiseOps, AttentionOps, RecurrenceOps, Protocol):
    """The kernels of one backend: nothing in it changes once made. Not safe to call from two threads at once, nor in a
    child that was forked (its worker threads stay behind): make one per process.
    """

    @property
    def name(self) -> str:
        """What runs, for the start-up report: `torch`, `native-avx2`, `native-amx`, `triton`."""
        ...

    @property
    def num_threads(self) -> int: ...

    @property
    def activation_bits(self) -> int:
        """What inputs of weights in codes are rounded to; 0 if they stay as they are."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, [.., H] -> the same shape, contiguous.

        Computed in float32 and rounded once. x has two or three dimensions.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, then `rms_norm` of the sum as it was rounded into residual."""
        ...

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        """table[rows]: table [R] int64, rows [S] int32 -> [S] int64."""
        ...

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """table[rows] = values: table [R] and values [S] int64, rows [S] int32. Either value may stay in a row that is
        named twice (the padding row)."""
        ...

    def finite_rows(self, x: Tensor) -> Tensor:
        """x [T, H] contiguous -> [T] bool: False for a row with a NaN or an infinity."""
        ...

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, V] float32 -> ids [S] int64 of each row's first maximum, and finite [S] bool.

        A row with a NaN or +inf, or with nothing but -inf, is not finite; its id is 0.
        """
        ...

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw one token per row of logits [S, V] float32 -> ids [S] int64; 0 for a row that is not finite.

        Of softmax(logits / temperature) the top_k most likely are kept, then of those the most likely that make up
        top_p of their sum, then of those whatever is at least min_p times the most likely. Ties with the least likely
        that is kept are kept: the order of ids decides nothing. Chosen is the token at which the running sum of what is
        kept, in the order of ids, first exceeds `uniform` times the whole.
        """
        ...
