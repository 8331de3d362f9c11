from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.attention import KvCache, PagedKv
from tests.ops.helpers import assert_close, assert_same_bits, normal, to_int8

pytestmark = pytest.mark.quick(10)

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (64, 64), (80, 32), (128, 128), (64, 10)])
def test_apply_rope_equals_the_reference_in_place(
    native: NativeOps, reference: Ops, dtype: torch.dtype, tokens: int, head_dim: int, rotary: int
) -> None:
    angles = normal((300, rotary // 2), torch.float32, seed=1)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(2))
    ours = normal((tokens, 8 * head_dim), dtype, seed=3)
    theirs = ours.clone()
    for ops, qkv in ((native, ours), (reference, theirs)):
        q = qkv[:, : 5 * head_dim].view(tokens, 5, head_dim)
        k = qkv[:, 5 * head_dim : 7 * head_dim].view(tokens, 2, head_dim)
        ops.attention.apply_rope(q, k, positions, cos_sin)
    assert_close(ours, theirs)
    assert_same_bits(ours[:, 7 * head_dim :], theirs[:, 7 * head_dim :])


@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
@pytest.mark.parametrize(
    ("dtype", "kept"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=["float32", "rounded", "bfloat16"]
)
def test_store_kv_writes_the_given_slots_and_no_others(
    native: NativeOps, reference: Ops, dtype: torch.dtype, kept: torch.dtype, tokens: int
) -> None:
    loc = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:tokens]
    kv = normal((tokens, 2 * 3 * 48), dtype, seed=2)
    k, v = kv[:, :144].view(tokens, 3, 48), kv[:, 144:].view(tokens, 3, 48)
    caches = [normal((400, 3, 48), kept, seed=3) for _ in range(4)]
    native.attention.store_kv(k, v, KvCache(caches[0], caches[1]), loc)
    reference.attention.store_kv(k, v, KvCache(caches[2], caches[3]), loc)
    assert_same_bits(caches[0], caches[2])
    assert_same_bits(caches[1], caches[3])


def test_store_kv_of_values_within_keys(each_ops: Ops, dtype: torch.dtype) -> None:
    latent = normal((5, 1, 40 + 9), dtype, seed=2)[..., :40]
    k_cache = normal((20, 1, 40), dtype, seed=3)
    expected, loc = k_cache.clone(), torch.tensor([3, 1, 4, 15, 9])
    expected[loc] = latent
    each_ops.attention.store_kv(latent, latent[..., :32], KvCache(k_cache, k_cache[..., :32]), loc)
    assert_same_bits(k_cache, expected)


def test_store_kv_of_values_of_another_size(each_ops: Ops, dtype: torch.dtype) -> None:
    k, v, loc = normal((3, 2, 24), dtype, seed=1), normal((3, 2, 16), dtype, seed=2), torch.tensor([7, 2, 5])
    k_cache, v_cache = torch.zeros(9, 2, 24, dtype=dtype), torch.zeros(9, 2, 16, dtype=dtype)
    each_ops.attention.store_kv(k, v, KvCache(k_cache, v_cache), loc)
    assert_same_bits(k_cache[loc], k)
    assert_same_bits(v_cache[loc], v)
    assert not v_cache[[0, 1, 3, 4, 6, 8]].any()


@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
@pytest.mark.parametrize("rotary", [10, 64])
def test_rope_and_store_kv_has_the_bits_of_one_after_the_other(
    each_ops: Ops, dtype: torch.dtype, tokens: int, rotary: int
) -> None:
    angles = normal((300, rotary // 2), torch.float32, seed=1)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(2))
    loc = torch.randperm(400, generator=torch.Generator().manual_seed(3))[:tokens]
    results = []
    for fused in (True, False):
        qkv = normal((tokens, 9 * 64), dtype, seed=4)
        q, k, v = (part.view(tokens, part.shape[1] // 64, 64) for part in qkv.split([5 * 64, 2 * 64, 2 * 64], dim=1))
        cache = KvCache(*(torch.zeros(400, 2, 64, dtype=dtype) for _ in range(2)))
        if fused:
            each_ops.attention.rope_and_store_kv(q, k, v, positions, cos_sin, cache, loc)
        else:
            each_ops.attention.apply_rope(q, k, positions, cos_sin)
            each_ops.attention.store_kv(k, v, cache, loc)
        results.append((q.clone(), cache.k, cache.v))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


AXES = [0, 1, 2, 0, 1, 2, 0, 1]


def three_positions(tokens: int) -> torch.Tensor:
    return torch.randint(300, (3, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
@pytest.mark.parametrize("heads", [(5, 2), (3, 0)])
def test_apply_rope_with_axes_turns_each_pair_by_its_own_position(
    each_ops: Ops, dtype: torch.dtype, tokens: int, heads: tuple[int, int]
) -> None:
    angles = normal((300, 8), torch.float32, seed=1)
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=1), three_positions(tokens)
    q, k = (normal((tokens, num, 20), dtype, seed=num) for num in heads)
    expected = [x.clone() for x in (q, k)]
    each_ops.attention.apply_rope(q, k, positions, cos_sin, axes=torch.tensor(AXES, dtype=torch.int32))
    for i, axis in enumerate(AXES):
        cos, sin = (cos_sin[positions[axis], at].unsqueeze(1) for at in (i, i + 8))
        for x in expected:
            first, second = x[..., i].float(), x[..., i + 8].float()
            x[..., i], x[..., i + 8] = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    for ours, theirs in zip((q, k), expected, strict=True):
        assert_close(ours, theirs)
        assert_same_bits(ours[..., 16:], theirs[..., 16:])


@pytest.mark.parametrize("axes", [AXES, [0, 0, 1, 1, 1, 2, 2, 2]], ids=["interleaved", "runs"])
def test_rope_of_equal_positions_has_the_bits_of_one_position(
    each_ops: Ops, dtype: torch.dtype, axes: list[int]
) -> None:
    angles = normal((300, 8), torch.float32, seed=1)
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=1), three_positions(40)[0]
    results = []
    for more in ({}, {"axes": torch.tensor(axes, dtype=torch.int32)}):
        q, k, v = (normal((40, num, 16), dtype, seed=num) for num in (4, 2, 3))
        cache = KvCache(*(torch.zeros(40, 2, 16, dtype=dtype) for _ in range(2)))
        of_axes = positions.repeat(3, 1) if more else positions
        each_ops.attention.rope_and_store_kv(q, k, v[:, :2], of_axes, cos_sin, cache, torch.arange(40), **more)
        results.append((q, k, *cache[:2]))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("head_dim", [12, 64, 80])
def test_8_bit_caches_hold_each_heads_codes_and_scale(each_ops: Ops, dtype: torch.dtype, head_dim: int) -> None:
    k, v = normal((6, 3, head_dim), dtype, seed=1), normal((6, 3, 40), dtype, seed=2)
    k[2] = 0
    loc = torch.tensor([7, 2, 5, 1, 0, 8])
    k_cache, v_cache = torch.zeros(9, 3, head_dim, dtype=torch.int8), torch.zeros(9, 3, 40, dtype=torch.int8)
    k_scale, v_scale = torch.zeros(9, 3), torch.zeros(9, 3)
    each_ops.attention.store_kv(k, v, KvCache(k_cache, v_cache, k_scale, v_scale), loc)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        torch.testing.assert_close(scale[loc], to_int8(x)[1])
        error = cache[loc] * scale[loc].unsqueeze(-1) - x.float()
        assert (error.abs() <= scale[loc].unsqueeze(-1) * 0.501).all()
        assert not cache[[3, 4, 6]].any()
    assert not k_cache[5].any()


def test_a_head_that_is_not_finite_has_no_finite_scale(each_ops: Ops, dtype: torch.dtype) -> None:
    k = normal((2, 2, 64), dtype, seed=1)
    k[0, 1, 33], k[1, 0, 5] = float("nan"), float("inf")
    cache, scale = torch.zeros(2, 2, 64, dtype=torch.int8), torch.zeros(2, 2)
    each_ops.attention.store_kv(k, k, KvCache(cache, cache.clone(), scale, scale.clone()), torch.arange(2))
    assert scale.isfinite().tolist() == [[True, False], [False, True]]


def test_8_bit_values_within_keys_have_the_codes_of_the_keys(each_ops: Ops, dtype: torch.dtype) -> None:
    latent, loc = normal((5, 1, 49), dtype, seed=2), torch.tensor([3, 1, 4, 15, 9])
    cache, scale = torch.zeros(20, 1, 49, dtype=torch.int8), torch.zeros(20, 1)
    each_ops.attention.store_kv(latent, latent[..., :32], KvCache(cache, cache[..., :32], scale, scale), loc)
    error = cache[loc] * scale[loc].unsqueeze(-1) - latent.float()
    assert (error.abs() <= scale[loc].unsqueeze(-1) * 0.501).all()


def attention_with(ops: Ops, dtype: torch.dtype, kind: str, bad: float) -> torch.Tensor:
    """Of the 40 tokens' first heads, where token 7's key is not right."""
    kept = torch.int8 if "8 bit" in kind else BF16 if "16 bit" in kind else dtype
    size, n, heads = 32, 40, 1 if "within" in kind else 2
    q, k, v = (normal((n, h, size), dtype, seed=i).abs() for i, h in enumerate((2, heads, heads)))
    k[7, 0] = bad if bad == bad else torch.where(torch.arange(size) == 5, bad, k[7, 0].float()).to(dtype)
    caches = [torch.zeros(n + 4, heads, size, dtype=kept) for _ in range(2)]
    scales: list[torch.Tensor | None] = [None, None]
    if "8 bit" in kind:
        scales = [torch.zeros(n + 4, heads) for _ in range(2)]
    if "within" in kind:
        v, caches[1], scales[1] = k[..., :16], caches[0][..., :16], scales[0]
    cache = KvCache(*caches, *scales)
    loc, starts = torch.arange(4, n + 4), torch.tensor([0, n], dtype=torch.int32)
    if kind == "rope":
        cos_sin = torch.cat([torch.ones(n, size // 2), torch.zeros(n, size // 2)], dim=1)
        ops.attention.rope_and_store_kv(q, k, v, torch.arange(n), cos_sin, cache, loc)
    else:
        ops.attention.store_kv(k, v, cache, loc)
    paged = PagedKv(
        page_table=torch.arange(22, dtype=torch.int32).view(2, 11) % 11 + 1,
        rows=torch.zeros(1, dtype=torch.int32),
        q_start=starts,
        seq_lens=starts[1:],
        page_size=4,
        out_cache_loc=loc,
    )
    return ops.attention.paged_attention(q, cache, paged, scale=1.0)[:, 0]


@pytest.mark.parametrize("kind", ["plain", "within keys", "8 bit", "8 bit within keys", "16 bit", "rope"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_key_that_is_not_finite_shows_in_its_own_tokens_attention(
    each_ops: Ops, dtype: torch.dtype, kind: str, bad: float
) -> None:
    """C30: -inf in a key may give the token no weight at all, and only later tokens would meet it."""
    assert not attention_with(each_ops, dtype, kind, bad)[7].isfinite().any()


def test_so_does_a_key_that_rounding_makes_infinite(each_ops: Ops) -> None:
    assert not attention_with(each_ops, F32, "16 bit", -3.4e38)[7].isfinite().any()


def test_finite_rows_flags_each_row_with_a_nan_or_an_infinity(each_ops: Ops, dtype: torch.dtype) -> None:
    for width in (1, 7, 16, 63, 576):
        x = normal((6, width), dtype, seed=width)
        for row, bad in ((1, float("nan")), (2, float("inf")), (4, float("-inf"))):
            x[row, width - 1 if row == 2 else width // 2] = bad
        assert each_ops.sampling.finite_rows(x).tolist() == [True, False, False, True, False, True]
    assert each_ops.sampling.finite_rows(normal((0, 64), dtype, seed=1)).tolist() == []
