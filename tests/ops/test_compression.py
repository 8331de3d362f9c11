"""Compression of blocks and attention over a window and entries: native kernels against the definition in torch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.compression import Blocks, Compression, TokenRing
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(12)

ROWS, COLUMNS, PAGE = 4, 6, 16
RATES = [(4, True), (8, False), (2, True), (16, False)]
# The lengths before a step, and the tokens in it; row 0 is the padding row. What is beyond a row's pages stands at its
# last position and goes to page 0.
STEPS = {
    "decodes": ([0, 7, 30, 63], [1, 1, 1, 1]),
    "drafts": ([0, 6, 30, 13], [4, 5, 0, 3]),
    "prompts": ([0, 0, 17, 3], [2, 70, 40, 1]),
    "beyond the pages of a row": ([0, 93, 2, 0], [0, 6, 3, 0]),
    "nothing": ([0, 5, 0, 0], [0, 0, 0, 0]),
}


class Step:
    """Sequences of rows 0 to 3 over a shuffled page table and page map; padding is at position and location 0."""

    def __init__(self, name: str) -> None:
        self.lens, self.counts = STEPS[name]
        generator = torch.Generator().manual_seed(1)
        num_pages = (ROWS - 1) * COLUMNS
        table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        table[1:] = (torch.randperm(num_pages, generator=generator) + 1).view(ROWS - 1, COLUMNS)
        page_map = torch.zeros(num_pages + 1, dtype=torch.int32)
        page_map[1:] = torch.randperm(num_pages, generator=generator) + 1
        starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32)
        spans = [(row, range(n, n + count)) for row, (n, count) in enumerate(zip(self.lens, self.counts, strict=True))]
        at = [(row, position if row else 0) for row, span in spans for position in span]
        self.positions = torch.tensor([min(position, COLUMNS * PAGE - 1) for _, position in at], dtype=torch.int64)
        self.loc = torch.tensor(
            [
                int(table[row, position // PAGE]) * PAGE + position % PAGE if row and position < COLUMNS * PAGE else 0
                for row, position in at
            ],
            dtype=torch.int64,
        )
        self.full = PagedKv(
            page_table=table,
            rows=torch.arange(ROWS, dtype=torch.int32),
            q_start=starts,
            seq_lens=torch.tensor([n + count for n, count in zip(self.lens, self.counts, strict=True)]).int(),
            page_size=PAGE,
            out_cache_loc=self.loc,
        )
        self.window = self.full.mapped(page_map, self.loc)
        self.num_pages = num_pages

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def paged(self, how: Compression) -> PagedKv:
        return self.full if how.by_row else self.window

    def ring(self, how: Compression, width: int, dtype: torch.dtype) -> TokenRing:
        rings = ROWS if how.by_row else self.num_pages + 1
        return TokenRing(*(normal((rings, how.ring, width), dtype, seed) for seed in (5, 6)))

    def cache(self, entries: int, dim: int, dtype: torch.dtype, seed: int) -> KvCache:
        keys = normal(((self.num_pages + 1) * entries, 1, dim), dtype, seed)
        return KvCache(keys, keys)


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def hows(rate: int, overlap: bool) -> Compression:
    return Compression(rate=rate, overlap=overlap, ring=(2 * rate if overlap else rate) + 3, by_row=not overlap)


def assert_same_blocks(got: Blocks, expected: Blocks) -> None:
    for field in fields(Blocks):
        assert_same_bits(getattr(got, field.name), getattr(expected, field.name))


@pytest.mark.parametrize(("rate", "overlap"), RATES)
def test_planned_blocks_are_the_reference_s(
    native: NativeOps, reference: Ops, step: Step, rate: int, overlap: bool
) -> None:
    how = hows(rate, overlap)
    given = step.positions, step.loc, step.paged(how), how
    assert_same_blocks(native.compression.plan_blocks(*given), reference.compression.plan_blocks(*given))


@pytest.mark.parametrize(("rate", "overlap"), RATES)
def test_compressed_blocks_and_kept_states_are_the_reference_s(
    native: NativeOps, reference: Ops, dtype: torch.dtype, step: Step, rate: int, overlap: bool
) -> None:
    how, size = hows(rate, overlap), 20
    width = size * (1 + overlap)
    kv, gate = normal((step.num_tokens, 2 * width), dtype, 1).chunk(2, dim=1)
    bias = normal((rate, width), torch.float32, 2)
    blocks = reference.compression.plan_blocks(step.positions, step.loc, step.paged(how), how)
    rings = [step.ring(how, width, dtype) for _ in range(2)]
    entries = [
        ops.compression.compress(kv, gate, bias, ring, blocks)
        for ops, ring in zip((native, reference), rings, strict=True)
    ]
    assert_close(*entries)
    for ours, theirs in zip(*rings, strict=True):
        # Place 0 of the padding ring takes what is kept nowhere.
        assert_same_bits(ours.flatten(0, 1)[1:].contiguous(), theirs.flatten(0, 1)[1:].contiguous())
    ends = ((step.positions + 1) % rate == 0) & (step.loc >= PAGE)
    assert int((blocks.loc > 0).sum()) == int(ends.sum())
    assert not entries[0][blocks.loc == 0].any(), "blocks that no token ends become zeros"


def test_first_positions_of_blocks_equal_those_of_the_reference(native: NativeOps, reference: Ops, step: Step) -> None:
    """The ring has other positions than the step, so that a block begun before reads them."""
    how = hows(4, False)
    blocks = reference.compression.plan_blocks(step.positions, step.loc, step.paged(how), how)
    positions = torch.stack([step.positions + axis for axis in (0, 100, 200)])
    rings = [torch.arange(ROWS * how.ring * 3, dtype=torch.float32).view(ROWS, how.ring, 3) + 1000 for _ in range(2)]
    ours, theirs = (
        ops.compression.first_positions(positions, ring, blocks)
        for ops, ring in zip((native, reference), rings, strict=True)
    )
    assert_same_bits(ours, theirs)
    assert_same_bits(*(ring.flatten(0, 1)[1:].contiguous() for ring in rings))
    for block, first in enumerate(blocks.first.tolist()):
        if blocks.in_step[block, 0]:
            assert theirs[:, block].tolist() == [first, first + 100, first + 200]
        elif blocks.exists[block, 0]:
            assert (theirs[:, block] >= 1000).all()
        else:
            assert not theirs[:, block].any()


def test_states_that_do_not_exist_may_be_anything(native: NativeOps, reference: Ops) -> None:
    """The first block has none before it; what its ring holds there is another conversation's."""
    step, how = Step("prompts"), hows(4, True)
    kv, gate = (normal((step.num_tokens, 16), torch.float32, seed) for seed in (1, 2))
    bias = normal((4, 16), torch.float32, 3)
    blocks = reference.compression.plan_blocks(step.positions, step.loc, step.paged(how), how)
    first = (blocks.first == 0) & blocks.in_step[:, -4:].all(dim=1)
    assert int(first.sum()) == 1
    for ops in (native, reference):
        found = []
        for fill in (0.0, torch.nan):
            ring = step.ring(how, 16, torch.float32)
            for part in ring:
                part.fill_(fill)
            found.append(ops.compression.compress(kv, gate, bias, ring, blocks)[first])
        assert_same_bits(*found)
        assert found[0].isfinite().all()


def test_unrotate_undoes_the_rotation(native: NativeOps, reference: Ops, dtype: torch.dtype) -> None:
    x, positions = normal((9, 3, 20), dtype, 1), torch.arange(9) * 3
    angles = torch.rand(40, 6, generator=torch.Generator().manual_seed(2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    ours, theirs = x.clone(), x.clone()
    native.compression.unrotate(ours, positions, cos_sin)
    reference.compression.unrotate(theirs, positions, cos_sin)
    assert_close(ours, theirs)
    back = ours.clone()
    native.attention.apply_rope(back, back[:, :0], positions, cos_sin)
    assert_close(back, x)


@pytest.mark.parametrize("window", [1, 6, 40])
@pytest.mark.parametrize("selected", [False, True])
def test_attention_over_a_window_and_entries_is_the_reference_s(
    native: NativeOps, reference: Ops, dtype: torch.dtype, step: Step, window: int, selected: bool
) -> None:
    """What nobody sees is NaN (C5)."""
    rate, heads, dim = 4, 11, 20
    seen = reference.compression.entry_pages(step.positions, step.full, rate)
    mine = native.compression.entry_pages(step.positions, step.full, rate)
    for name in ("rows", "q_start", "seq_lens"):
        assert_same_bits(getattr(mine, name), getattr(seen, name))
    if selected:
        most = 5
        counts = seen.seq_lens.clamp(max=most)
        chosen = torch.arange(most, dtype=torch.int32).expand(step.num_tokens, most)
        chosen = torch.where(chosen < counts.unsqueeze(1), chosen, -1).contiguous()
        seen = reference.selection.token_pages(chosen, counts, seen).with_lens(
            reference.compression.selected_lens(seen.seq_lens, counts)
        )
    q, sinks = normal((step.num_tokens, heads, dim), dtype, 3), normal((heads,), torch.float32, 4)
    tokens, entries = step.cache(PAGE, dim, dtype, 7), step.cache(PAGE // rate, dim, dtype, 8)
    tokens.k[:PAGE], entries.k[: PAGE // rate] = 0.5, 0.5  # the padding page is finite
    given = step.positions, (tokens, step.window), (entries, seen)
    options = {"scale": 0.3, "window": window, "sinks": sinks}
    expected = reference.compression.compressed_attention(q, *given, **options)
    assert_close(native.compression.compressed_attention(q, *given, **options), expected)
    assert expected.isfinite().all()
    unseen = _unseen(step, window, tokens)
    poisoned = KvCache(unseen, unseen)
    given = step.positions, (poisoned, step.window), (entries, seen)
    assert_same_bits(reference.compression.compressed_attention(q, *given, **options), expected)


def _unseen(step: Step, window: int, cache: KvCache) -> Tensor:
    """Return the keys with NaN in all locations that no query of the step reads."""
    keys = torch.full_like(cache.k, torch.nan)
    table, mapped = step.full.page_table, step.window.page_map
    assert mapped is not None
    for row, (length, count) in enumerate(zip(step.lens, step.counts, strict=True)):
        first, last = (max(0, length - window + 1), length + count) if row else (0, 1)
        for position in range(first, min(last, COLUMNS * PAGE) if count else first):
            at = int(mapped[int(table[row, position // PAGE])]) * PAGE + position % PAGE
            keys[at] = cache.k[at]
    return keys


def test_a_failed_selection_gives_nan_and_an_empty_one_the_window(native: NativeOps, reference: Ops) -> None:
    step = Step("decodes")
    seen, counts = torch.tensor([0, 2, 7, 16]).int(), torch.tensor([0, 0, 3, 0]).int()
    for ops in (native, reference):
        assert ops.compression.selected_lens(seen, counts).tolist() == [0, -1, 3, -1]
    entries = reference.compression.entry_pages(step.positions, step.full, 4).with_lens(
        reference.compression.selected_lens(seen, counts)
    )
    q, sinks = normal((4, 2, 8), torch.float32, 1), torch.zeros(2)
    given = step.positions, (step.cache(PAGE, 8, torch.float32, 2), step.window)
    for ops in (native, reference):
        out = ops.compression.compressed_attention(
            q, *given, (step.cache(4, 8, torch.float32, 3), entries), scale=1.0, window=4, sinks=sinks
        )
        assert out.isnan().all(dim=2).all(dim=1).tolist() == [False, True, False, True]
        assert out[[0, 2]].isfinite().all()


def test_a_sequence_without_entries_selects_none(native: NativeOps, reference: Ops) -> None:
    step = Step("decodes")
    entries = reference.compression.entry_pages(step.positions, step.full, 16)
    none = replace(entries, seq_lens=torch.zeros_like(entries.seq_lens))
    q, weights = normal((4, 2, 8), torch.float32, 1), normal((4, 2), torch.float32, 2)
    for ops in (native, reference):
        positions, counts = ops.selection.select_tokens(q, weights, step.cache(1, 8, torch.float32, 3), none, 3)
        assert not counts.any()
        assert (positions == -1).all()
