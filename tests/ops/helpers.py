"""Random inputs, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forebay.ops.reference.attention import LARGEST_CODE, KvCache, PagedKv

# bfloat16 keeps 8 bits: one rounding of two results that differ in the last float32 bits is up to 2^-8 apart.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}  # relative and absolute


def assert_close(actual: Tensor, expected: Tensor, *, state_dtype: torch.dtype = torch.float32) -> None:
    """`state_dtype`: what was in between, in which one rounding may have gone the other way."""
    coarsest = min(expected.dtype, state_dtype, key=lambda dtype: dtype.itemsize)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[coarsest], atol=TOLERANCE[coarsest])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def to_codes(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [slots, heads, D] and scales [slots, heads]; the scales of what is not a number are not, either."""
    scale = cache.float().abs().amax(dim=-1) / LARGEST_CODE[dtype]
    codes = (cache.float() / scale.unsqueeze(-1)).nan_to_num(nan=99.0)
    return codes.to(torch.float8_e4m3fn).view(dtype) if dtype == torch.uint8 else codes.round().to(dtype), scale


def to_int8(cache: Tensor) -> tuple[Tensor, Tensor]:
    return to_codes(cache, torch.int8)


def no_sequences() -> PagedKv:
    none = torch.empty(0, dtype=torch.int32)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return PagedKv(page_table=table, rows=none, q_start=starts, seq_lens=none, page_size=16, out_cache_loc=none.long())


@dataclass(kw_only=True)
class PagedCase:
    """Sequences of seq_lens tokens, the last query_lens of them queries, on scattered pages of a poisoned cache.

    `v_dim` 0: as head_dim. `latent`: values are the first v_dim entries of the keys' rows. `mapped`: the page table
    names pages by other numbers, which a page map leads to those of the cache. `shares`: (i, j, n) for
    sequence i, whose first n tokens, a multiple of the page size, are on the pages of sequence j. `int8`, `fp8`: the
    cache holds codes and scales; `cache_dtype` None: it holds entries of `dtype`. `pictures`: (i, first, end) of
    pictures in sequence i, within which attention is in both directions.
    """

    seq_lens: list[int]
    query_lens: list[int]
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_dim: int = 0
    latent: bool = False
    mapped: bool = False
    int8: bool = False
    fp8: bool = False
    cache_dtype: torch.dtype | None = None
    shares: tuple[tuple[int, int, int], ...] = ()
    with_sinks: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    sliding_window: int = 0
    pictures: tuple[tuple[int, int, int], ...] = ()
    seed: int = 0
    q_lens_total: int = field(init=False)

    def __post_init__(self) -> None:
        self.q_lens_total = sum(self.query_lens)
        longest = max(self.seq_lens, default=0)
        self.pages_per_row = max(1, -(-longest // self.page_size))
        count = len(self.seq_lens)
        num_pages = count * self.pages_per_row
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed)) + 1
        self.page_table = torch.zeros(count + 1, self.pages_per_row, dtype=torch.int32)
        slots = (num_pages + 1) * self.page_size
        shape, kept = (slots, self.kv_heads, self.head_dim), self.cache_dtype or self.dtype
        self.k_cache = torch.full(shape, float("nan"), dtype=kept)
        v_dim = self.v_dim or self.head_dim
        values = torch.full((*shape[:2], v_dim), float("nan"), dtype=kept)
        self.v_cache = self.k_cache[..., :v_dim] if self.latent else values
        self.sinks = normal((self.q_heads,), torch.float32, self.seed, scale=2) if self.with_sinks else None
        for i, length in enumerate(self.seq_lens):
            # The key of a position depends on the sequence and position alone, so that layouts can be compared.
            used = -(-length // self.page_size)
            self.page_table[i + 1, :used] = order[i * self.pages_per_row :][:used].int()
            at = torch.arange(length)
            loc = self.page_table[i + 1, at // self.page_size].long() * self.page_size + at % self.page_size
            self.k_cache[loc] = normal((length, *shape[1:]), kept, self.seed * 1000 + i)
            if not self.latent:
                self.v_cache[loc] = normal((length, self.kv_heads, v_dim), kept, self.seed * 1000 + 500 + i)
        self.k_scale = self.v_scale = None
        if self.int8 or self.fp8:
            codes = torch.uint8 if self.fp8 else torch.int8
            self.k_cache, self.k_scale = to_codes(self.k_cache, codes)
            self.v_cache, self.v_scale = to_codes(self.v_cache, codes)
            if self.latent:
                self.v_cache, self.v_scale = self.k_cache[..., :v_dim], self.k_scale
        self.queries = [
            normal((length, self.q_heads, self.head_dim), self.dtype, self.seed * 1000 + 900 + i)
            for i, length in enumerate(self.seq_lens)
        ]

        for i, j, tokens in self.shares:
            self.page_table[i + 1, : tokens // self.page_size] = self.page_table[j + 1, : tokens // self.page_size]
        self.page_map = torch.arange(2 * num_pages + 1, dtype=torch.int32).roll(num_pages) if self.mapped else None
        if self.mapped:
            self.page_table[1:] += num_pages

    def run(
        self, ops: Any, sequences: list[int] | None = None, until: dict[int, tuple[int, int]] | None = None
    ) -> Tensor:
        """Attention of the given sequences; `until` overrides (first query, end) of some of them."""
        chosen = list(range(len(self.seq_lens))) if sequences is None else sequences
        spans = [(until or {}).get(i, (self.seq_lens[i] - self.query_lens[i], self.seq_lens[i])) for i in chosen]
        q = torch.cat([self.queries[i][a:b] for i, (a, b) in zip(chosen, spans, strict=True)])
        options = {"scale": self.head_dim**-0.5, "sliding_window": self.sliding_window, "sinks": self.sinks}
        options["softcap"] = self.softcap
        if self.pictures:
            ahead = [self._ahead(i)[a:b] for i, (a, b) in zip(chosen, spans, strict=True)]
            options["ahead"] = torch.cat(ahead)
        attended: Tensor = ops.attention.paged_attention(q, self.cache, self._pages(chosen, spans), **options)
        return attended

    def _ahead(self, sequence: int) -> Tensor:
        ahead = torch.zeros(self.seq_lens[sequence], dtype=torch.int32)
        for i, first, end in self.pictures:
            if i == sequence:
                ahead[first:end] = torch.arange(end - first).flip(0)
        return ahead

    @property
    def paged(self) -> PagedKv:
        """All sequences with their queries."""
        lens = zip(self.seq_lens, self.query_lens, strict=True)
        return self._pages(list(range(len(self.seq_lens))), [(length - queries, length) for length, queries in lens])

    def _pages(self, chosen: list[int], spans: list[tuple[int, int]]) -> PagedKv:
        return PagedKv(
            page_table=self.page_table,
            rows=torch.tensor([i + 1 for i in chosen], dtype=torch.int32),
            q_start=torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int(),
            seq_lens=torch.tensor([b for _, b in spans], dtype=torch.int32),
            page_size=self.page_size,
            out_cache_loc=torch.empty(0, dtype=torch.int64),
            page_map=self.page_map,
        )

    @property
    def cache(self) -> KvCache:
        return KvCache(self.k_cache, self.v_cache, self.k_scale, self.v_scale)
