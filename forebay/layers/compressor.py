"""Compressors: a block of tokens becomes one entry of the cache.

DeepSeek-V4, sections 2.3.1 and 2.3.2; checked against transformers' `deepseek_v4`.

Shape letters: T tokens, H hidden size, C entries of a token's state, D size of an entry, M blocks that a step may end.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.families.base.rope import NUM_AXES
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import Rows, in_order
from forebay.layers.rotary import RopeSpec
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.compression import Blocks, Compression
from forebay.pools.cache_spec import BlockPositions, BlockStates, CompressedKv, OverlappingBlockStates


def turned(size: int, rope_dim: int, *, count: int = 1) -> Rows:
    """Return the rows of `count` heads of `size`, each with its rotated part first. In a checkpoint these are the last
    `rope_dim` rows, in neighbouring pairs; here the first of each pair come before the second ones."""
    rows: list[range] = []
    for head in range(0, count * size, size):
        first, stop = head + size - rope_dim, head + size
        rows += [range(first, stop, 2), range(first + 1, stop, 2), range(head, first)]
    return tuple(part for part in rows if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """Entries of `size` for `rate` tokens each, with `overlap` of the block before as well. `rope` is of the last
    entries of each."""

    name: str
    hidden_size: int
    size: int
    rate: int
    overlap: bool
    rope: RopeSpec
    norm_eps: float

    def build(self, parts: Parts) -> Compressor:
        """Return the part with its weights."""
        return Compressor(self, parts)


class BlockEntries:
    """Keeps an entry of `width` for each block of `rate` tokens, and the states of the tokens whose block is open.
    With the `axes` of M-RoPE the tokens' rotary positions are kept, too."""

    def __init__(
        self, parts: Parts, *, rate: int, width: int, overlap: bool = False, axes: Tensor | None = None
    ) -> None:
        self._ops, self._rate, self._overlap, self._axes = parts.ops, rate, overlap, axes
        states = OverlappingBlockStates if overlap else BlockStates
        self._entries = parts.keep(CompressedKv(rate=rate, width=width))
        self._states = parts.keep(states(rate=rate, width=width * (1 + overlap)))
        self._positions = None if axes is None else parts.keep(BlockPositions(rate=rate, width=NUM_AXES))

    def ended(self, ctx: ForwardContext, kv: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Blocks]:
        """Keep the states of the step's tokens. Returns the blocks that these end, and their entries before what a
        model does with them, [M, D]. See `CompressionOps.compress`."""
        blocks = self._blocks(ctx)
        return self._ops.compression.compress(kv, gate, bias, ctx.cache.ring(self._states), blocks), blocks

    def first_positions(self, ctx: ForwardContext, blocks: Blocks) -> Tensor:
        """Return what the first tokens of the blocks that the step ends are rotated by, [M], or [3, M] with M-RoPE.
        Keeps the rotary positions of the step's tokens."""
        if self._positions is None:
            return blocks.first
        kept = ctx.cache.positions(self._positions)
        return self._ops.compression.first_positions(ctx.rotated_by(self._axes), kept, blocks)

    def keep(self, ctx: ForwardContext, entries: Tensor, blocks: Blocks) -> PagedKv:
        """Write entries [M, 1, D]. Returns those that each of the step's tokens sees."""
        self._ops.attention.store_kv(entries, entries, self.cache(ctx), blocks.loc)
        return self._ops.compression.entry_pages(ctx.positions, ctx.full, self._rate)

    def cache(self, ctx: ForwardContext) -> KvCache:
        """Return the cache of the entries."""
        return ctx.cache.kv(self._entries)

    def _blocks(self, ctx: ForwardContext) -> Blocks:
        """Return the blocks that the step ends, planned once for all layers of this kind."""
        paged, ring = ctx.pages(ctx.cache.specs[self._states].kind), ctx.cache.ring(self._states).kv.shape[1]
        how = Compression(rate=self._rate, overlap=self._overlap, ring=ring, by_row=not self._overlap)
        if how not in ctx.carried.blocks:
            ctx.carried.blocks[how] = self._ops.compression.plan_blocks(
                ctx.positions, ctx.full.out_cache_loc, paged, how
            )
        return ctx.carried.blocks[how]


class Compressor:
    """Makes entries of projections of the tokens, by gates of their own."""

    def __init__(self, spec: CompressorSpec, parts: Parts) -> None:
        parts = parts.within(spec.name)
        self._ops, self._spec = parts.ops, spec
        self._entries = BlockEntries(parts, rate=spec.rate, width=spec.size, overlap=spec.overlap)
        width = spec.size * (1 + spec.overlap)
        order = turned(spec.size, spec.rope.dim, count=1 + spec.overlap)
        gates = tuple(range(rows.start + width, rows.stop + width, rows.step) for rows in order)
        outputs = {"wkv": width, "wgate": width}
        self._project = parts.linear(outputs, spec.hidden_size, rows=(*order, *gates), min_bits=16)
        self._bias = parts.tensor(
            "ape", spec.rate, width, float32=True, change=lambda bias: in_order(bias, order).contiguous()
        )
        own = turned(spec.size, spec.rope.dim)
        self._norm = parts.tensor("norm.weight", spec.size, change=lambda weight: in_order(weight, own))
        self._cos_sin = parts.rope(spec.rope)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> PagedKv:
        """x [T, H]: write the entries of the blocks that the step's tokens end. Returns those that each token sees."""
        ops, spec = self._ops, self._spec
        kv, gate = self._project(ctx, x).chunk(2, dim=-1)
        entries, blocks = self._entries.ended(ctx, kv, gate, self._bias)
        entries = ops.norms.rms_norm(entries, self._norm, spec.norm_eps).unsqueeze(1)
        ops.attention.apply_rope(entries, entries[:, :0], blocks.first, self._cos_sin)
        return self._entries.keep(ctx, entries, blocks)

    def entries(self, ctx: ForwardContext) -> KvCache:
        """Return the cache of the entries."""
        return self._entries.cache(ctx)
