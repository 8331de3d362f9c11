"""Compressed attention: the ops of every backend, defined in torch.

A block of tokens becomes one entry. Queries read a window of tokens, and entries of all blocks before.

DeepSeek-V4, section 2.3; checked against transformers' `deepseek_v4`.

Shape letters: T tokens, S sequences, M blocks that a step ends at most, B tokens of an entry, L locations. C is the
size of a token's state, D that of an entry, Hq are query heads, Q rings of R places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.ops.reference.accept import by_token
from forebay.ops.reference.attention import KvCache, PagedKv, code_values

# Float32 entries of keys that attention gathers at once: 64 MiB.
_MOST_GATHERED: Final = 1 << 24


class TokenRing(NamedTuple):
    """Rings [Q, R, C] by position: the states of the last tokens, until their block has become an entry."""

    kv: Tensor
    gate: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """How tokens become entries: one of `rate` tokens each. With `overlap` an entry is also made of the block before.
    Rings have `ring` places, and belong to a page (of `page_map`'s numbers) or, where `by_row`, to a request row."""

    rate: int
    overlap: bool
    ring: int
    by_row: bool

    @property
    def span(self) -> int:
        """B."""
        return 2 * self.rate if self.overlap else self.rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks that a step ends, and the places of their tokens' states: for all layers of one `Compression`.

    Token b of block m is the step's own token `tokens[m, b]` if `in_step`, else at place `places[m, b]` of the rings,
    flattened; if not `exists`, there is none. Blocks that no token ends have nothing that exists, and location 0.
    """

    tokens: Tensor  # [M, B] int64
    places: Tensor  # [M, B] int64
    in_step: Tensor  # [M, B] bool
    exists: Tensor  # [M, B] bool
    first: Tensor  # [M] int64: the position of the block's first token
    loc: Tensor  # [M] int64: of its entry
    kept_at: Tensor  # [T] int64: the place that keeps a token's state, 0 where a later token of the step has its place


class CompressionOps:
    """Entries of blocks, and attention over a window and entries, defined in torch without reading a value on the
    host."""

    def plan_blocks(self, positions: Tensor, loc: Tensor, paged: PagedKv, compression: Compression) -> Blocks:
        """Return the blocks that the step's tokens end, which are at positions [T] and locations loc [T] of full KV;
        their entry is at loc // rate. `paged` locates the rings of pages.

        A position decides whether its token is there: a ring may hold anything, of other requests too.
        """
        rate, span, device = compression.rate, compression.span, positions.device
        num_tokens = len(positions)
        most = most_blocks(num_tokens, len(paged.rows), rate)
        seqs, offsets = by_token(paged.q_start, num_tokens)
        rows = paged.rows.index_select(0, seqs).long()
        real = loc >= paged.page_size
        ends = real & ((positions + 1) % rate == 0)
        order = torch.where(ends, ends.cumsum(0) - 1, most)
        last = torch.full((most + 1,), num_tokens, dtype=torch.int64, device=device)
        last = last.scatter_(0, order, torch.arange(num_tokens, device=device))[:most]
        live, last = last < num_tokens, last.clamp(max=max(num_tokens - 1, 0))
        back = torch.arange(span - 1, -1, -1, device=device)
        at = positions.index_select(0, last).unsqueeze(1) - back
        places = _places(rows.index_select(0, last).unsqueeze(1), at.clamp(min=0), paged, compression)
        in_step = live.unsqueeze(1) & (back <= offsets.index_select(0, last).unsqueeze(1))
        exists = live.unsqueeze(1) & (at >= 0)
        return Blocks(
            tokens=torch.where(in_step, last.unsqueeze(1) - back, 0),
            places=torch.where(exists & ~in_step, places, 0),
            in_step=in_step,
            exists=exists,
            first=torch.where(live, at[:, -rate], 0),
            loc=torch.where(live, loc.index_select(0, last) // rate, 0),
            kept_at=_kept_at(positions, rows, seqs, offsets, real, paged, compression),
        )

    def compress(self, kv: Tensor, gate: Tensor, bias: Tensor, state: TokenRing, blocks: Blocks) -> Tensor:
        """Return the entries of the step's blocks before their norm, [M, D], and keep the states of its tokens.

        kv and gate [T, C], which may be views into wider rows; bias [rate, C] float32 is added to the gates by the
        token's place in its block. Each channel of an entry is the mean of its tokens' kv, weighted by the softmax of
        their gates. Where C is 2 D an entry has the first half of the channels of the block before, and the second half
        of its own. Computed in float32, rounded once.
        """
        rate, span = len(bias), blocks.tokens.shape[1]
        size = bias.shape[1] * rate // span
        values, gates = (
            _of_blocks(own, kept, blocks, rate, size) for own, kept in ((kv, state.kv), (gate, state.gate))
        )
        shift = torch.cat([bias[:, :size], bias[:, -size:]]) if span > rate else bias
        there = blocks.exists.unsqueeze(-1)
        nothing = torch.where(blocks.exists[:, -1:], -torch.inf, 0.0).unsqueeze(-1)
        weights = torch.where(there, gates + shift, nothing).softmax(dim=1)
        entries = (values.masked_fill(~there, 0) * weights).sum(dim=1).to(kv.dtype)
        for own, kept in ((kv, state.kv), (gate, state.gate)):
            kept.flatten(0, 1).index_copy_(0, blocks.kept_at, own.to(kept.dtype))
        return entries

    def first_positions(self, positions: Tensor, kept: Tensor, blocks: Blocks) -> Tensor:
        """Return the rotary positions of the first tokens of the step's blocks, [A, M] int64, and keep those of its
        tokens.

        positions [A, T] int64; kept [Q, R, A] float32, whose places are those of the states. Blocks are without
        overlap. Blocks that no token ends have position 0.
        """
        first, flat = blocks.tokens[:, 0], kept.flatten(0, 1)
        found = torch.where(blocks.in_step[:, 0], positions[:, first], flat[blocks.places[:, 0]].T.long())
        flat.index_copy_(0, blocks.kept_at, positions.T.to(kept.dtype))
        return found.masked_fill(~blocks.exists[:, 0], 0)

    def unrotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Undo `apply_rope` of x [T, Hq, D] in place: rotate by the negative angles."""
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x.dtype)

    def entry_pages(self, positions: Tensor, paged: PagedKv, rate: int) -> PagedKv:
        """Return each token, at positions [T], as a sequence of one query over the entries that it sees, those of whole
        blocks up to it. Pages hold page_size / rate of them."""
        starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        seqs, _ = by_token(paged.q_start, len(positions))
        rows, lens = paged.rows.index_select(0, seqs), ((positions + 1) // rate).int()
        return entry_sequences(rows, starts, lens, paged, rate)

    def selected_lens(self, seen: Tensor, counts: Tensor) -> Tensor:
        """Return the lengths of selections of `counts` [T] int32 of the entries `seen` [T] int32: -1 where one failed,
        which selects nothing though there is something."""
        return torch.where(seen == 0, 0, torch.where(counts == 0, -1, counts))

    def compressed_attention(
        self,
        q: Tensor,
        positions: Tensor,
        tokens: tuple[KvCache, PagedKv],
        entries: tuple[KvCache, PagedKv],
        *,
        scale: float,
        window: int,
        sinks: Tensor,
    ) -> Tensor:
        """Attention of q [T, Hq, D] at positions [T] over the last `window` tokens and, with one softmax, over entries:
        all that `entries` has of each token, as sequences of one query -> [T, Hq, D].

        Caches have one head, whose keys are its values. sinks [Hq] as for `paged_attention`. What no query sees may be
        anything. A length of entries below 0 stands for a selection that failed: the result is NaN.
        """
        out = torch.empty_like(q)
        (cache, paged), (packed, seen) = tokens, entries
        seqs, _ = by_token(paged.q_start, len(q))
        rows = paged.rows.index_select(0, seqs).long()
        back = torch.arange(window - 1, -1, -1, device=q.device)
        columns = torch.arange(seen.page_table.shape[1] * seen.page_size, device=q.device)
        step = max(1, _MOST_GATHERED // ((window + len(columns)) * q.shape[2]))
        for first in range(0, len(q), step):
            part = slice(first, first + step)
            at = positions[part].unsqueeze(1) - back
            lens = seen.seq_lens[part].unsqueeze(1)
            pages = seen.page_table[seen.rows[part].long()][:, columns // seen.page_size].long()
            own = _read(cache, _token_locations(rows[part].unsqueeze(1), at.clamp(min=0), paged), at >= 0)
            packs = _read(packed, pages * seen.page_size + columns % seen.page_size, columns < lens)
            visible = torch.cat([at >= 0, columns < lens], dim=1)
            result = _attend(q[part], torch.cat([own, packs], dim=1), visible, scale, sinks)
            out[part] = result.masked_fill((lens < 0).unsqueeze(-1), torch.nan).to(q.dtype)
        return out


def most_blocks(num_tokens: int, num_seqs: int, rate: int) -> int:
    """Return the largest number of blocks that this number of tokens and sequences can end."""
    return min(num_tokens, (num_tokens + num_seqs * (rate - 1)) // rate)


def entry_sequences(rows: Tensor, q_start: Tensor, lens: Tensor, paged: PagedKv, rate: int) -> PagedKv:
    """Return tokens as sequences of one query over entries: see `CompressionOps.entry_pages`."""
    return PagedKv(
        page_table=paged.page_table,
        rows=rows,
        q_start=q_start,
        seq_lens=lens,
        page_size=paged.page_size // rate,
        out_cache_loc=paged.out_cache_loc,
        one_each=True,
    )


def _places(rows: Tensor, positions: Tensor, paged: PagedKv, compression: Compression) -> Tensor:
    """Where rings keep positions of request rows."""
    if compression.by_row:
        rings = rows
    else:
        rings = _pages(rows, positions, paged)
    return rings * compression.ring + positions % compression.ring


def _kept_at(
    positions: Tensor,
    rows: Tensor,
    seqs: Tensor,
    offsets: Tensor,
    real: Tensor,
    paged: PagedKv,
    compression: Compression,
) -> Tensor:
    """Return the places at which the states of the step's tokens are kept. A state that a later token of the step would
    replace is not kept, so that each place is written once. Ring 0 takes the states that are not kept."""
    ring, behind = compression.ring, paged.q_start.diff().index_select(0, seqs).long() - 1 - offsets
    if not compression.by_row:
        behind = torch.minimum(behind, paged.page_size - 1 - positions % paged.page_size)
    return torch.where(real & (behind < ring), _places(rows, positions, paged, compression), 0)


def _of_blocks(own: Tensor, kept: Tensor, blocks: Blocks, rate: int, size: int) -> Tensor:
    """Return the channels [M, B, D] float32 that entries are made of: of a step's `own` [T, C], or as rings kept
    them."""
    flat, span = kept.flatten(0, 1), blocks.tokens.shape[1]
    halves = (slice(0, size), slice(-size, None)) if span > rate else (slice(None),)
    parts = []
    for i, channels in enumerate(halves):
        some = slice(i * rate, (i + 1) * rate)
        before = flat[:, channels][blocks.places[:, some]].float()
        parts.append(
            torch.where(blocks.in_step[:, some, None], own[:, channels][blocks.tokens[:, some]].float(), before)
        )
    return torch.cat(parts, dim=1)


def _token_locations(rows: Tensor, positions: Tensor, paged: PagedKv) -> Tensor:
    return _pages(rows, positions, paged) * paged.page_size + positions % paged.page_size


def _pages(rows: Tensor, positions: Tensor, paged: PagedKv) -> Tensor:
    """Return the pages of the caches that hold positions of request rows."""
    pages = paged.page_table[rows, positions // paged.page_size].long()
    return pages if paged.page_map is None else paged.page_map[pages].long()


def _read(cache: KvCache, locations: Tensor, visible: Tensor) -> Tensor:
    """Return the entries at locations [n, N] as float32 [n, N, D], zeros for those that are not visible."""
    found = cache.k[locations, 0]
    if cache.k_scale is not None:
        found = code_values(found) * cache.k_scale[locations]
    found = found.float()
    return found.masked_fill(~visible.unsqueeze(-1), 0)


def _attend(q: Tensor, keys: Tensor, visible: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """q [n, Hq, D] over keys [n, N, D], which are values as well -> [n, Hq, D] float32."""
    scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1).expand(len(q), -1, 1)], dim=-1)
    return torch.bmm(scores.softmax(dim=-1)[..., :-1], keys)
