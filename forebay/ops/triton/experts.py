"""Many small linear layers at once: the experts that a step's tokens chose, and one layer per head.

Shape letters: T tokens, E experts, k experts per token, Hq heads, N and K a layer's outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.reference.elementwise import ElementwiseOps
from forebay.ops.reference.experts import ExpertActivation, ExpertOps, Experts, HeadWeights
from forebay.ops.triton.launch import kernel
from forebay.ops.triton.linear import TritonLinearWeight
from forebay.ops.triton.products import Runs, chip_of, in_fp8, num_blocks, product, tile_of

_BLOCK: Final = 1024  # entries that one program takes at a time: of a row's sum, of the ids of all choices


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
    """`weights` keep the tensors that `addresses` [Hq, 7] are of."""

    weights: tuple[TritonLinearWeight, ...]
    addresses: Tensor


@kernel
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


@kernel
@triton.jit(do_not_specialize=["num_rows"])
def _order(ids, starts, owners, order, num_rows, ROWS: tl.constexpr, BLOCK_BY_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Order rows by expert, those of one expert as they came: a program for each expert, which reads all ids."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_rows, BLOCK):
        chosen = tl.load(ids + begin + lane, mask=begin + lane < num_rows, other=1 << 30)
        before += (chosen < expert).to(tl.int32)
        mine += (chosen == expert).to(tl.int32)
    first = tl.sum(before, 0)
    count = tl.sum(mine, 0)
    tl.store(starts + expert, first)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, num_rows)
    if not BLOCK_BY_ROW:
        stop = (first + count) // ROWS + expert + 1
        for block in range(first // ROWS + expert, stop, BLOCK):
            tl.store(owners + block + lane, expert, mask=block + lane < stop)
    if count > 0:
        place = first
        for begin in range(0, num_rows, BLOCK):
            here = tl.load(ids + begin + lane, mask=begin + lane < num_rows, other=1 << 30) == expert
            at = place + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(order + at, begin + lane, mask=here)
            if BLOCK_BY_ROW:
                tl.store(owners + at, expert, mask=here)
            place += tl.sum(here.to(tl.int32), 0)


@triton.jit
def _best_of(values, e, BLOCK: tl.constexpr):
    """The first of the greatest values."""
    return tl.min(tl.where(values == tl.max(values, 0), e, BLOCK), 0)


@triton.jit
def _share_among_near(logits, allowed, e, chosen, far):
    """The chosen logit's share of the softmax over allowed ones that are at most `far` below it. NaN is near."""
    top = tl.sum(tl.where(e == chosen, logits, 0.0), 0)
    some = tl.where(allowed, logits, top)
    below = tl.div_rn(top - some, tl.maximum(tl.abs(some), top))
    near = tl.where(allowed & ~(below > far), logits, float("-inf"))
    most = tl.max(near, 0)
    weights = tl.exp(near - tl.where(most == float("-inf"), 0.0, most))
    return tl.sum(tl.where(e == chosen, weights, 0.0), 0) / tl.sum(weights, 0)


@kernel
@triton.jit
def _sparse_mixer(logits, ids, weights, far, E: tl.constexpr, BLOCK: tl.constexpr):
    """Choose a token's two experts. A program reads no other token."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    live = e < E
    own = tl.load(logits + token * E + e, mask=live, other=float("-inf"))
    order = tl.where(own == own, own, float("-inf"))
    first = _best_of(order, e, BLOCK)
    # Behind the first one, of which there may be equals: not a number is chosen before a place without an expert.
    others = tl.where(e == first, float("-inf"), order)
    second = tl.min(tl.where((others == tl.max(others, 0)) & (e != first), e, BLOCK), 0)
    to = token * 2
    tl.store(ids + to, first.to(tl.int64))
    tl.store(ids + to + 1, second.to(tl.int64))
    tl.store(weights + to, _share_among_near(own, live, e, first, far))
    tl.store(weights + to + 1, _share_among_near(own, live & (e != first), e, second, far))


def _runs(topk_ids: Tensor, experts: TritonExperts, x: Tensor, *, fp8_inputs: bool) -> Runs:
    """The rows that tokens gave to experts, with the tokens as rows of x and the choices as rows of the result."""
    num_rows, num_groups = topk_ids.numel(), experts.num_experts
    forms = {experts.gate_up[0].form, experts.down[0].form}
    # How many rows an expert has is known on the device alone: their mean decides.
    block_rows = min(
        tile_of(
            num_rows // num_groups,
            torch.uint8 if fp8_inputs and form is not None and form.multiplies_fp8 else x.dtype,
            form,
            chip_of(x.device),
        ).rows
        for form in forms
    )
    sizes = num_groups + 1, num_blocks(num_rows, num_groups, block_rows), num_rows
    starts, owners, order = (torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
    _order[(num_groups,)](
        topk_ids.contiguous(),
        starts,
        owners,
        order,
        num_rows,
        ROWS=block_rows,
        BLOCK_BY_ROW=num_rows <= num_groups,
        BLOCK=_BLOCK,
    )
    return Runs(starts, owners, num_groups, block_rows, order, topk_ids.shape[1], order)


class TritonExpertOps(ExpertOps):
    """See `ExpertOps`. What decides for a token's experts is the reference's own torch, but for a SparseMixer."""

    def __init__(self, linear: LinearOps, elementwise: ElementwiseOps, *, fp8_inputs: bool = False) -> None:
        super().__init__(linear, elementwise)
        self._fp8_inputs = fp8_inputs

    def _inputs(self, x: Tensor, w: TritonLinearWeight) -> tuple[Tensor, Tensor | None]:
        """Rows as a weight multiplies them, and their scales in FP8."""
        return in_fp8(x) if self._fp8_inputs and w.form is not None and w.form.multiplies_fp8 else (x, None)

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
        """One kernel orders the rows by expert; the host never learns how many each has."""
        assert isinstance(experts, TritonExperts), type(experts)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x) == 0:
            return out
        choices, n = topk_ids.shape[1], x.shape[1]
        num_rows, inner, outer = len(x) * choices, experts.gate_up[0], experts.down[0]
        runs = _runs(topk_ids, experts, x, fp8_inputs=self._fp8_inputs)
        hidden = torch.empty(num_rows, inner.out_features, dtype=x.dtype, device=x.device)
        rows, scales = self._inputs(x, inner)
        product(rows, hidden, experts.gate_up_at, inner, num_rows, replace(runs, out_rows=None), scales)
        per_choice = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
        rows, scales = self._inputs(experts.activate(hidden), outer)
        product(rows, per_choice, experts.down_at, outer, num_rows, replace(runs, x_rows=None), scales)
        _sum_choices[(len(x), triton.cdiv(n, _BLOCK))](per_choice, topk_weights, out, choices, n, BLOCK=_BLOCK)
        return out

    def sparse_mixer(self, logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        (tokens, count), device = logits.shape, logits.device
        ids = torch.empty(tokens, 2, dtype=torch.int64, device=device)
        weights = torch.empty(tokens, 2, dtype=torch.float32, device=device)
        block = triton.next_power_of_2(count)
        if tokens:
            _sparse_mixer[(tokens,)](logits.contiguous(), ids, weights, 2 * jitter, E=count, BLOCK=block, num_warps=1)
        return ids, weights

    def pack_heads(self, weights: Sequence[LinearWeight]) -> HeadWeights:
        packed = [w for w in weights if isinstance(w, TritonLinearWeight) and w.form is None and w.bias is None]
        if len(packed) < len(weights):
            return super().pack_heads(weights)
        return TritonHeads(*_table(packed))

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        if not isinstance(heads, TritonHeads):
            return super().linear_heads(x, heads)
        (tokens, num_heads, k), like = x.shape, heads.weights[0]
        out = torch.empty(tokens, num_heads, like.out_features, dtype=x.dtype, device=x.device)
        if tokens:
            runs = _runs_of_heads(tokens, num_heads, tile_of(tokens, x.dtype, None, chip_of(x.device)).rows, x.device)
            product(x.reshape(-1, k), out.view(-1, out.shape[2]), heads.addresses, like, tokens * num_heads, runs)
        return out


def _runs_of_heads(tokens: int, num_heads: int, block_rows: int, device: torch.device) -> Runs:
    """Rows by head: each head has one of each token. Row t * num_heads + h of x and of the result is head h's."""
    heads = torch.arange(num_heads, dtype=torch.int32, device=device)
    rows = torch.arange(tokens * num_heads, dtype=torch.int32, device=device).view(tokens, num_heads).t().reshape(-1)
    starts = torch.arange(num_heads + 1, dtype=torch.int32, device=device) * tokens
    blocks = num_blocks(tokens * num_heads, num_heads, block_rows)
    first = starts[:-1] // block_rows + heads
    at = torch.arange(blocks, dtype=torch.int32, device=device)
    owners = heads if tokens == 1 else (torch.searchsorted(first, at, right=True, out_int32=True) - 1)
    return Runs(starts, owners, num_heads, block_rows, rows, 1, rows)


def _table(experts: Sequence[LinearWeight]) -> tuple[tuple[TritonLinearWeight, ...], Tensor]:
    packed = tuple(expert for expert in experts if isinstance(expert, TritonLinearWeight))
    forms = {(w.values.shape, w.form, w.bias is None) for w in packed}
    assert len(packed) == len(experts), "experts that these ops did not pack"
    assert len(forms) == 1, f"experts of several forms: {forms}"
    return packed, torch.stack([w.addresses for w in packed])
