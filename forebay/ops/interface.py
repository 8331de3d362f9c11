"""What each op does, for every backend.

Shape letters: T tokens, S sequences, H hidden size, I intermediate size, N and K a linear layer's outputs and inputs,
Hq query heads, Hk KV heads, D head size, R rotary size, P pages per row, E experts, k experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from forebay.ops.attention import AttentionOps
from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.recurrence import RecurrenceOps


class Ops(LinearOps, AttentionOps, RecurrenceOps, Protocol):
    """The kernels of one backend: nothing in it changes once made. Not safe to call from two threads at once, nor in a
    child that was forked (its worker threads stay behind): make one per process.
    """

    @property
    def name(self) -> str:
        """What runs, for the start-up report: `torch`, `native-avx2`, `native-avx512`, `native-amx`."""
        ...

    @property
    def num_threads(self) -> int: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, [.., H] -> the same shape, contiguous.

        Computed in float32 and rounded once. x has two or three dimensions.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, then `rms_norm` of the sum as it was rounded into residual."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2I] -> silu(x[:, :I]) * x[:, I:], [T, I]."""
        ...

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x [T, 2I] -> gelu(x[:, :I]) * x[:, I:], [T, I]; gelu in its tanh form, or with `exact` by the error function
        (arXiv 1606.08415, section 2)."""
        ...

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float) -> Tensor:
        """x [T, 2I] -> [T, I], of gate x[:, :I] and up x[:, I:]: with gate cut at `limit` and up at +-`limit`,
        (up + 1) * gate * sigmoid(alpha * gate). gpt-oss, as in transformers' reference."""
        ...

    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0)^2, [T, I] -> [T, I]."""
        ...

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), [T, I] each (may be views into wider rows) -> [T, I]."""
        ...

    def mul_softplus(self, scale: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        """scale * log(1 + exp(x + bias)), in float32: x [T, I] (may be a view into wider rows), scale and bias [I]
        float32 -> [T, I] float32."""
        ...

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        """table[rows]: table [R] int64, rows [S] int32 -> [S] int64."""
        ...

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """table[rows] = values: table [R] and values [S] int64, rows [S] int32. Either value may stay in a row that is
        named twice (the padding row)."""
        ...

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, V] float32 -> ids [S] int64 of each row's first maximum, and finite [S] bool.

        A row with a NaN or +inf, or with nothing but -inf, is not finite; its id is 0.
        """
        ...

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniform: Tensor,
    ) -> Tensor:
        """Draw one token per row of logits [S, V] float32 -> ids [S] int64; 0 for a row that is not finite.

        Of softmax(logits / temperature) the top_k most likely are kept, then of those the most likely that make up
        top_p of their sum, then of those whatever is at least min_p times the most likely. Ties with the least likely
        that is kept are kept: the order of ids decides nothing. Chosen is the token at which the running sum of what is
        kept, in the order of ids, first exceeds `uniform` times the whole.
        temperature, top_p, min_p [S] float32 and top_k [S] int64; top_k 0, top_p 1, min_p 0 keep all, and None stands
        for such a column. uniform [S] float64 of [0, 1).
        """
        ...

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        topk_ids: Tensor,
        topk_weights: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """A mixture of experts: sum over j of topk_weights[t, j] * expert[topk_ids[t, j]](x[t]) -> [T, H].

        E experts, each activate(linear(x, gate_up[e])) through down[e], with silu_and_mul where `activate` is None.
        topk_ids [T, k] int64, topk_weights [T, k] float32 or x's dtype. Summed in float32 in the order of j and
        rounded once.
        """
        ...
