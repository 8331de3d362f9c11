"""The definition of every op in torch: what the native twin is tested against, and what runs where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.ops import sampling
from forebay.ops.interface import LinearWeight
from forebay.ops.reference_recurrence import TorchRecurrence


@dataclass(frozen=True, slots=True)
class TorchLinearWeight:
    """`packed` is oneDNN's own blocked copy of a bfloat16 weight, where this torch can make one."""

    weight: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int


class TorchOps(TorchRecurrence):
    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.name = "torch"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        out_features, in_features = weight.shape
        packed = _prepack(weight)
        kept = weight.clone() if packed is None else None
        return TorchLinearWeight(kept, packed, None if bias is None else bias.clone(), in_features, out_features)

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, TorchLinearWeight), type(w)
        if w.packed is None or x.shape[0] == 0:
            weight = x.new_zeros(w.out_features, w.in_features) if w.weight is None else w.weight
            return F.linear(x, weight, w.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.packed, w.bias, "none", [], "")
        return out

    def linear_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        return self.linear(x, w).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * normed).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="none" if exact else "tanh") * up).to(x.dtype)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * gate * (alpha * gate).sigmoid()).to(x.dtype)

    def relu2(self, x: Tensor) -> Tensor:
        return x.float().relu().square().to(x.dtype)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def mul_softplus(self, scale: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return scale * F.softplus(x.float() + bias)

    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            x[..., : 2 * half] = rotated.to(x.dtype)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor) -> None:
        k_cache[loc] = k
        v_cache[loc] = v

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_lens: Tensor,
        page_size: int,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=q.dtype)
        starts, lens = q_start.tolist(), seq_lens.tolist()
        for i, row in enumerate(rows.tolist()):
            first, end, length = starts[i], starts[i + 1], lens[i]
            if first == end:
                continue
            positions = torch.arange(length)
            slots = page_table[row, positions // page_size].long() * page_size + positions % page_size
            query_positions = torch.arange(length - (end - first), length)
            out[first:end] = _attend(
                q[first:end], k_cache[slots], v_cache[slots], query_positions, scale, sliding_window, sinks
            )
        return out

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.index_copy_(0, rows.long(), values)

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        top = logits.amax(dim=-1)  # NaN if any entry is
        finite = top.isfinite()
        first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)
        return torch.where(finite, first, torch.zeros_like(first)), finite

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniform: Tensor,
    ) -> Tensor:
        return sampling.sample_rows(logits, temperature, top_k, top_p, min_p, uniform)

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        topk_ids: Tensor,
        topk_weights: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        activate = activate or self.silu_and_mul
        per_choice = x.new_zeros(*topk_ids.shape, x.shape[1])
        for e in sorted(set(topk_ids.flatten().tolist())):
            token, choice = torch.where(topk_ids == e)
            per_choice[token, choice] = self.linear(activate(self.linear(x[token], gate_up[e])), down[e])
        return (per_choice.float() * topk_weights.float().unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _prepack(weight: Tensor) -> Tensor | None:
    """oneDNN re-packs a bfloat16 weight at every F.linear: doing it once is 3 times faster at 1 to 16 rows.

    None where this build of torch cannot, and for float32, where it does not pay.
    """
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, sliding_window: int, sinks: Tensor | None
) -> Tensor:
    """q [n, Hq, D] at `positions`, over k [L, Hk, D] and v [L, Hk, Dv] -> [n, Hq, Dv]."""
    groups = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[0])
    visible = keys <= positions.unsqueeze(1)
    if sliding_window > 0:
        visible &= keys > positions.unsqueeze(1) - sliding_window
    # Keys that no query sees may hold NaN, and 0 x NaN is NaN: V is masked as well as the scores (C5).
    seen = visible.any(dim=0).view(-1, 1, 1)
    k32 = k.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
    v32 = v.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k32) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v32).to(q.dtype)
