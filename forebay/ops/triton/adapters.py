"""LoRA adapters of linear layers on a GPU.

A program works for some consecutive tokens and one slot, and ends at once if none of them has that slot. In a prompt
all tokens have the same one, and in a decode step there are few. So nothing is sorted, and no count reaches the host.

Shape letters: T tokens, N and K a linear layer's outputs and inputs, J layers that a weight joins, R the largest rank.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.adapters import PANEL, AdapterOps, AdapterTable
from forebay.ops.triton.common import dot
from forebay.ops.triton.launch import kernel

_TOKENS: Final = 16  # of a program: the least that a matrix unit takes
_DEPTH: Final = 64  # inputs at a time


@kernel
@triton.jit
def _shrink(
    x, slots, a, ranks, inner, tokens, x_stride, k, R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """inner[t, j] = A[s, j] x[t] for the tokens of one slot."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1)
    layers = tl.num_programs(1)
    slot = tl.program_id(2) + 1
    own = tl.load(slots + token, mask=token < tokens, other=0) == slot
    rank = tl.load(ranks + slot * layers + layer)
    if (tl.sum(own.to(tl.int32)) == 0) | (rank == 0):
        return
    r = tl.arange(0, BLOCK)
    row = (slot * layers + layer).to(tl.int64) * R + r
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        here = x + token.to(tl.int64)[:, None] * x_stride + at[None, :]
        values = tl.load(here, mask=own[:, None] & (at < k)[None, :], other=0.0)
        weights = tl.load(a + row[None, :] * k + at[:, None], mask=(r < rank)[None, :] & (at < k)[:, None], other=0.0)
        acc += dot(values, weights.to(x.dtype.element_ty))
    place = inner + (token.to(tl.int64) * layers + layer)[:, None] * R + r[None, :]
    tl.store(place, acc, mask=own[:, None] & (r < rank)[None, :])


@kernel
@triton.jit
def _expand(
    inner, slots, b, ranks, panels, out, tokens, layers, outputs, R: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """out[t] += B[s] inner[t] for one panel of outputs and the tokens of one slot."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    panel = tl.program_id(1)
    slot = tl.program_id(2) + 1
    own = tl.load(slots + token, mask=token < tokens, other=0) == slot
    first = tl.load(panels + panel * 3)
    count = tl.load(panels + panel * 3 + 1)
    layer = tl.load(panels + panel * 3 + 2)
    rank = tl.load(ranks + slot * layers + layer)
    if (tl.sum(own.to(tl.int32)) == 0) | (rank == 0):
        return
    r = tl.arange(0, BLOCK)
    col = tl.arange(0, PANEL)
    place = inner + (token.to(tl.int64) * layers + layer)[:, None] * R + r[None, :]
    values = tl.load(place, mask=own[:, None] & (r < rank)[None, :], other=0.0)
    row = (slot.to(tl.int64) * tl.num_programs(1) + panel) * R + r
    weights = tl.load(b + row[:, None] * PANEL + col[None, :], mask=(r < rank)[:, None], other=0.0)
    added = dot(values, weights.to(tl.float32))
    at = out + token.to(tl.int64)[:, None] * outputs + first + col[None, :]
    live = own[:, None] & (col < count)[None, :]
    before = tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, (before + added).to(out.dtype.element_ty), mask=live)


class TritonAdapters(AdapterOps):
    """See `AdapterOps`. Sums are those of matrix units, which take blocks of tokens whatever their slots are."""

    def add(self, out: Tensor, x: Tensor, slots: Tensor, table: AdapterTable) -> None:
        (tokens, k), (num_slots, layers, rank, _) = x.shape, table.a.shape
        if tokens == 0:
            return
        inner = torch.empty(tokens, layers, rank, dtype=torch.float32, device=x.device)
        blocks, sizes = triton.cdiv(tokens, _TOKENS), {"R": rank, "BLOCK": max(16, triton.next_power_of_2(rank))}
        _shrink[(blocks, layers, num_slots - 1)](
            x, slots, table.a, table.ranks, inner, tokens, x.stride(0), k, **sizes, TOKENS=_TOKENS, DEPTH=_DEPTH
        )
        _expand[(blocks, len(table.panels), num_slots - 1)](
            *(inner, slots, table.b, table.ranks, table.panels, out, tokens, layers, out.shape[1]),
            **sizes,
            TOKENS=_TOKENS,
            PANEL=PANEL,
        )
