"""The GPU's compressed attention and residual streams equal the reference, whatever is around a token; see
`test_triton`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.reference.attention import KvCache, PagedKv
from tests.ops.helpers import assert_same_bits, normal, to_int8
from tests.ops.test_compression import PAGE, Step, hows
from tests.ops.test_streams import mixing
from tests.ops.test_triton import device, ops, reference
from tests.ops.triton_device import assert_close, streams_of_a_gpu

__all__ = ["device", "ops", "reference"]  # fixtures

RATE, WIDTH, HEADS, DIM = 4, 20, 3, 20
OPTIONS = {"scale": 0.3, "window": 6, "sinks": normal((HEADS,), torch.float32, 4)}


def seen_by(step: Step, most: int | None, reference: Ops) -> PagedKv:
    """All entries, or `most` selected ones."""
    seen = reference.compression.entry_pages(step.positions, step.full, RATE)
    if most is None:
        return seen
    counts = seen.seq_lens.clamp(max=most)
    chosen = torch.arange(most, dtype=torch.int32).expand(step.num_tokens, most)
    chosen = torch.where(chosen < counts.unsqueeze(1), chosen, -1).contiguous()
    return reference.selection.token_pages(chosen, counts, seen).with_lens(
        reference.compression.selected_lens(seen.seq_lens, counts)
    )


def caches(step: Step, dtype: torch.dtype, *, int8: bool = False) -> tuple[KvCache, KvCache]:
    made = []
    for entries, seed in ((PAGE, 7), (PAGE // RATE, 8)):
        keys = step.cache(entries, DIM, dtype, seed).k
        codes, scale = to_int8(keys) if int8 else (keys, None)
        made.append(KvCache(codes, codes, scale, scale))
    return made[0], made[1]


@pytest.mark.parametrize(("rate", "overlap"), [(4, True), (8, False)])
def test_compressed_blocks_and_kept_states_equal_the_reference(
    ops: Ops, reference: Ops, dtype: torch.dtype, rate: int, overlap: bool
) -> None:
    step, how = Step("beyond the pages of a row"), hows(rate, overlap)
    width = WIDTH * (1 + overlap)
    kv, gate = normal((step.num_tokens, 2 * width), dtype, 1).chunk(2, dim=1)
    bias = normal((rate, width), torch.float32, 2)
    blocks = reference.compression.plan_blocks(step.positions, step.loc, step.paged(how), how)
    rings = [step.ring(how, width, dtype) for _ in range(2)]
    for kept in rings[0] + rings[1]:
        kept.flatten(0, 1)[0] = torch.nan  # what is nowhere
    ours, theirs = (
        each.compression.compress(kv, gate, bias, ring, blocks)
        for each, ring in zip((ops, reference), rings, strict=True)
    )
    assert_close(ours, theirs)
    assert not ours[blocks.loc == 0].any()
    for mine, other in zip(*rings, strict=True):
        assert_same_bits(mine.flatten(0, 1)[1:], other.flatten(0, 1)[1:])


def test_unrotate_equals_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype) -> None:
    x, positions = normal((5, 3, 20), dtype, 1), torch.arange(5) * 3
    angles = torch.rand(40, 6, generator=torch.Generator().manual_seed(2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    ours, theirs = x.clone(), x.clone()
    for each, turned in ((ops, ours), (reference, theirs)):
        each.compression.unrotate(turned, positions, cos_sin)
    assert_close(ours, theirs)


@pytest.mark.parametrize(("most", "int8"), [(None, False), (5, False), (5, True)])
def test_attention_over_a_window_and_entries_equals_the_reference(
    ops: Ops, reference: Ops, dtype: torch.dtype, most: int | None, int8: bool
) -> None:
    step = Step("drafts")
    tokens, entries = caches(step, dtype, int8=int8)
    q = normal((step.num_tokens, HEADS, DIM), dtype, 3)
    given = step.positions, (tokens, step.window), (entries, seen_by(step, most, reference))
    ours, theirs = (each.compression.compressed_attention(q, *given, **OPTIONS) for each in (ops, reference))
    assert_close(ours, theirs)


def test_a_failed_selection_gives_nan_on_a_gpu(ops: Ops, reference: Ops) -> None:
    step = Step("decodes")
    tokens, entries = caches(step, torch.float32)
    seen = seen_by(step, None, reference).with_lens(torch.tensor([0, -1, 3, -1]).int())
    q = normal((4, HEADS, DIM), torch.float32, 1)
    out = ops.compression.compressed_attention(q, step.positions, (tokens, step.window), (entries, seen), **OPTIONS)
    assert out.isnan().flatten(1).all(dim=1).tolist() == [False, True, False, True]
    assert out[::2].isfinite().all()


def test_c31_a_token_s_compressed_attention_has_the_same_bits_in_every_step(ops: Ops, reference: Ops) -> None:
    step = Step("drafts")
    tokens, entries = caches(step, torch.float32)
    seen = seen_by(step, None, reference)
    q = normal((step.num_tokens, HEADS, DIM), torch.float32, 3)
    given = (tokens, step.window), (entries, seen)
    whole = ops.compression.compressed_attention(q, step.positions, *given, **OPTIONS)
    one = torch.arange(2, dtype=torch.int32)
    for row, token in ((1, 8), (3, 11)):
        at = slice(token, token + 1)
        alone = replace(step.window, rows=torch.tensor([row], dtype=torch.int32), q_start=one)
        read = replace(seen, rows=seen.rows[at], seq_lens=seen.seq_lens[at], q_start=one)
        given = (tokens, alone), (entries, read)
        assert_same_bits(ops.compression.compressed_attention(q[at], step.positions[at], *given, **OPTIONS), whole[at])


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("streams", "hidden"), [(2, 20), (4, 33)])
def test_streams_are_mixed_as_the_reference_mixes_them_on_a_gpu(
    ops: Ops, reference: Ops, dtype: torch.dtype, streams: int, hidden: int, tokens: int
) -> None:
    x, out = normal((tokens, streams * hidden), dtype, 4), normal((tokens, hidden), dtype, 5)
    made, last = mixing(streams, hidden, last=False), mixing(streams, hidden, last=True)
    weights = reference.streams.mix_weights(x, made)
    for ours, theirs in zip(ops.streams.mix_weights(x, made), weights, strict=True):
        assert_close(ours, theirs)
    assert_close(ops.streams.last_weights(x, last), reference.streams.last_weights(x, last))
    for name, given, share in (("collapse_streams", x, weights.before), ("spread_streams", out, weights.behind)):
        assert_close(*(getattr(each.streams, name)(given, share) for each in (ops, reference)))
    mine, other = x.clone(), x.clone()
    ops.streams.mix_streams_(mine, weights.between)
    reference.streams.mix_streams_(other, weights.between)
    assert_close(mine, other)


def test_c31_a_token_s_streams_have_the_same_weights_among_any_number_of_tokens(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_of_a_gpu, "_SEGMENT", 64)
    x, hidden = normal((18, 2 * 70), torch.float32, 4), 70
    made, last = replace(mixing(2, hidden, last=False), iterations=2), mixing(2, hidden, last=True)

    def weights(streams: Tensor) -> list[Tensor]:
        return [*ops.streams.mix_weights(streams, made), ops.streams.last_weights(streams, last)]

    whole = weights(x)
    for at in (slice(0, 1), slice(15, 18)):
        for ours, theirs in zip(weights(x[at].clone()), whole, strict=True):
            assert_same_bits(ours, theirs[at])
