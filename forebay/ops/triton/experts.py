"""Many small linear layers at once: the experts that a step's tokens chose, and one layer per head.

Shape letters: T tokens, E experts, k experts per token, Hq heads, N and K a layer's outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.experts import ExpertActivation, ExpertOps, Experts, HeadWeights
from forebay.ops.linear import LinearWeight
from forebay.ops.triton.linear import TritonLinearWeight
from forebay.ops.triton.products import Runs, product

_BLOCK: Final = 1024  # entries of a row that one program sums up


@dataclass(frozen=True, slots=True, eq=False)
class TritonExperts(Experts):
    """`gate_up` and `down` keep the tensors that `gate_up_at` and `down_at` [E, 7] are the addresses of."""

    gate_up: tuple[TritonLinearWeight, ...]
    down: tuple[TritonLinearWeight, ...]
    gate_up_at: Tensor
    down_at: Tensor
    activate: Callable[[Tensor], Tensor]

    @property
    def num_experts(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True, eq=False)
class TritonHeads(HeadWeights):
    """`values` [Hq, K, N]."""

    values: Tensor


@triton.jit
def _sum_choices(per_choice, weights, out, choices, n, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    acc = tl.zeros([BLOCK], tl.float32)
    for j in range(choices):
        row = token * choices + j
        share = tl.load(weights + row).to(tl.float32)
        acc += share * tl.load(per_choice + row * n + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * n + at, acc.to(out.dtype.element_ty), mask=live)


class TritonExpertOps(ExpertOps):
    """See `ExpertOps`. What decides for a token's experts is the reference's own torch."""

    def pack_experts(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
        offset: float = 1.0,
    ) -> TritonExperts:
        activate = self._activation(activation, alpha, limit, offset)
        (inner, inner_at), (outer, outer_at) = _table(gate_up), _table(down)
        return TritonExperts(inner, outer, inner_at, outer_at, activate)

    def fused_experts(self, x: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The rows of each expert are brought together by a sort; the host never learns how many there are."""
        assert isinstance(experts, TritonExperts), type(experts)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x) == 0:
            return out
        choices, n = topk_ids.shape[1], x.shape[1]
        ids, order = topk_ids.flatten().sort(stable=True)
        edges = torch.arange(experts.num_experts + 1, device=ids.device)
        starts = torch.searchsorted(ids, edges, out_int32=True)
        inner, outer = experts.gate_up[0], experts.down[0]
        hidden = torch.empty(len(ids), inner.out_features, dtype=x.dtype, device=x.device)
        product(
            x, hidden, experts.gate_up_at, inner, len(ids), Runs(starts, experts.num_experts, x_rows=order // choices)
        )
        per_choice = torch.empty(len(ids), n, dtype=x.dtype, device=x.device)
        found = Runs(starts, experts.num_experts, out_rows=order)
        product(experts.activate(hidden), per_choice, experts.down_at, outer, len(ids), found)
        _sum_choices[(len(x), triton.cdiv(n, _BLOCK))](per_choice, topk_weights, out, choices, n, BLOCK=_BLOCK)
        return out

    def pack_heads(self, weights: Sequence[LinearWeight]) -> HeadWeights:
        packed = [w for w in weights if isinstance(w, TritonLinearWeight) and w.form is None and w.bias is None]
        if len(packed) < len(weights):
            return super().pack_heads(weights)
        return TritonHeads(torch.stack([w.values.t() for w in packed]))

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        if not isinstance(heads, TritonHeads):
            return super().linear_heads(x, heads)
        return torch.bmm(x.transpose(0, 1), heads.values).transpose(0, 1).contiguous()


def _table(experts: Sequence[LinearWeight]) -> tuple[tuple[TritonLinearWeight, ...], Tensor]:
    packed = tuple(expert for expert in experts if isinstance(expert, TritonLinearWeight))
    forms = {(w.values.shape, w.form, w.bias is None) for w in packed}
    assert len(packed) == len(experts), "experts that these ops did not pack"
    assert len(forms) == 1, f"experts of several forms: {forms}"
    return packed, torch.stack([w.addresses for w in packed])
