from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.attention import KvCache, segments
from tests.ops.helpers import PagedCase, assert_close, assert_same_bits, no_sequences, normal

pytestmark = pytest.mark.quick(14)

RAGGED = {"seq_lens": [1, 70, 33, 200, 64, 129], "query_lens": [1, 70, 5, 1, 1, 65]}
KINDS = {
    "sinks": {"q_heads": 6, "with_sinks": True},
    "sinks-in-a-window": {"q_heads": 6, "with_sinks": True, "sliding_window": 50},
    "capped": {"q_heads": 6, "softcap": 0.7, "with_sinks": True},
    "capped-in-a-window": {"q_heads": 6, "softcap": 2.0, "sliding_window": 50},
    "smaller-values": {"head_dim": 96, "v_dim": 64},
    "larger-values": {"head_dim": 12, "v_dim": 20},
    "latent": {"q_heads": 5, "kv_heads": 1, "head_dim": 80, "v_dim": 64, "latent": True},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.mark.parametrize("head_dim", [12, 16, 21, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_ragged_attention_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    case = PagedCase(**RAGGED, head_dim=head_dim, kv_heads=2, q_heads=2 * group, dtype=dtype)
    assert_close(case.run(native), case.run(reference))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("sliding_window", [0, 1, 17, 64, 1000])
def test_windows_and_page_sizes_equal_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, page_size: int, sliding_window: int
) -> None:
    case = PagedCase(**RAGGED, page_size=page_size, sliding_window=sliding_window, dtype=dtype)
    assert_close(case.run(native), case.run(reference))


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([], []), ([5], [0]), ([5, 9], [0, 2]), ([9, 5], [2, 0])], ids=str
)
def test_sequences_without_queries_are_allowed(
    native: NativeOps, reference: Ops, dtype: torch.dtype, seq_lens: list[int], query_lens: list[int]
) -> None:
    case = PagedCase(seq_lens=seq_lens, query_lens=query_lens, dtype=dtype)
    if seq_lens:
        assert_close(case.run(native), case.run(reference))
    else:
        q = torch.empty(0, 4, 64, dtype=dtype)
        assert native.attention.paged_attention(q, case.cache, no_sequences(), scale=0.125).shape == q.shape


def test_more_query_heads_than_a_piece_has_rows(native: NativeOps, reference: Ops, dtype: torch.dtype) -> None:
    case = PagedCase(seq_lens=[80], query_lens=[3], q_heads=71, kv_heads=1, dtype=dtype)
    assert_close(case.run(native), case.run(reference))


@pytest.mark.parametrize("sliding_window", [0, 50])
def test_a_sequence_does_not_depend_on_the_batch_around_it(
    native: NativeOps, dtype: torch.dtype, sliding_window: int
) -> None:
    case = PagedCase(**RAGGED, q_heads=6, dtype=dtype, sliding_window=sliding_window)
    together, start = case.run(native), 0
    for i, length in enumerate(case.query_lens):
        assert_same_bits(case.run(native, [i]), together[start : start + length])
        start += length


@pytest.mark.parametrize("sliding_window", [0, 1, 50])
@pytest.mark.parametrize("group", [1, 3])
def test_prefill_in_chunks_equals_prefill_at_once_and_decoding(
    native: NativeOps, dtype: torch.dtype, sliding_window: int, group: int
) -> None:
    case = PagedCase(seq_lens=[150], query_lens=[150], q_heads=2 * group, dtype=dtype, sliding_window=sliding_window)
    at_once = case.run(native)
    for chunk in (1, 7, 16, 64, 149):
        spans = [(a, min(a + chunk, 150)) for a in range(0, 150, chunk)]
        pieces = [case.run(native, until={0: span}) for span in spans]
        assert_same_bits(torch.cat(pieces), at_once)


@pytest.mark.parametrize("sliding_window", [0, 50])
def test_attention_does_not_depend_on_the_page_size(native: NativeOps, dtype: torch.dtype, sliding_window: int) -> None:
    results = [
        PagedCase(**RAGGED, page_size=size, dtype=dtype, sliding_window=sliding_window).run(native)
        for size in (1, 7, 16, 64, 256)
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_attention_does_not_depend_on_the_number_of_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    case = PagedCase(**RAGGED, dtype=dtype)
    assert_same_bits(case.run(native), case.run(single_threaded))


@pytest.mark.parametrize("sliding_window", [0, 20])
def test_padding_and_foreign_slots_never_influence_a_live_row_c5(
    each_ops: Ops, dtype: torch.dtype, sliding_window: int
) -> None:
    case = PagedCase(**RAGGED, dtype=dtype, sliding_window=sliding_window)
    assert case.k_cache[: case.page_size].isnan().all()  # page 0, and with it every slot that no sequence uses
    poisoned = case.run(each_ops)
    assert poisoned.isfinite().all()
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=0.0)
    assert_same_bits(case.run(each_ops), poisoned)


def test_what_has_left_the_window_never_influences_a_live_row(each_ops: Ops, dtype: torch.dtype) -> None:
    case = PagedCase(seq_lens=[150], query_lens=[10], page_size=1, sliding_window=20, dtype=dtype)
    before = case.run(each_ops)
    gone = case.page_table[1, : 150 - 10 - 20 + 1].long()
    case.k_cache[gone] = float("nan")
    case.v_cache[gone] = float("nan")
    assert_same_bits(case.run(each_ops), before)


@pytest.mark.parametrize("page_size", [1, 16])
def test_sinks_and_values_of_another_size_equal_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, kind: dict[str, Any], page_size: int
) -> None:
    case = PagedCase(**RAGGED, **kind, page_size=page_size, dtype=dtype)
    assert_close(case.run(native), case.run(reference))


@pytest.mark.parametrize("q_heads", [16, 71])
def test_latent_attention_of_deepseeks_size_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, q_heads: int
) -> None:
    case = PagedCase(
        seq_lens=[1, 130],
        query_lens=[1, 3],
        q_heads=q_heads,
        kv_heads=1,
        head_dim=576,
        v_dim=512,
        latent=True,
        dtype=dtype,
    )
    assert_close(case.run(native), case.run(reference))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_map_leads_to_the_pages_of_the_cache(each_ops: Ops, dtype: torch.dtype, page_size: int) -> None:
    plain, mapped = (
        PagedCase(**RAGGED, page_size=page_size, sliding_window=50, mapped=mapped, dtype=dtype)
        for mapped in (False, True)
    )
    assert not torch.equal(plain.page_table, mapped.page_table)
    assert_same_bits(mapped.run(each_ops), plain.run(each_ops))


def test_a_sink_is_a_key_without_a_value(each_ops: Ops) -> None:
    case = PagedCase(seq_lens=[9], query_lens=[1], q_heads=4, kv_heads=4, with_sinks=True)
    assert case.sinks is not None
    loc = case.page_table[1, 0] * case.page_size + torch.arange(9)
    scores = torch.einsum("hd,lhd->hl", case.queries[0][8], case.k_cache[loc]) / 8
    weights = torch.cat([scores, case.sinks.unsqueeze(1)], dim=1).softmax(dim=1)
    expected = torch.einsum("hl,lhd->hd", weights[:, :9], case.v_cache[loc])
    assert_close(case.run(each_ops)[0], expected)


def test_a_cap_holds_scores_and_not_sinks(each_ops: Ops) -> None:
    case = PagedCase(seq_lens=[9], query_lens=[1], q_heads=4, kv_heads=4, with_sinks=True, softcap=0.7)
    assert case.sinks is not None
    loc = case.page_table[1, 0] * case.page_size + torch.arange(9)
    scores = torch.einsum("hd,lhd->hl", case.queries[0][8], case.k_cache[loc]) / 8
    held = 0.7 * torch.tanh(scores / 0.7)
    weights = torch.cat([held, case.sinks.unsqueeze(1)], dim=1).softmax(dim=1)
    expected = torch.einsum("hl,lhd->hd", weights[:, :9], case.v_cache[loc])
    assert_close(case.run(each_ops)[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_query_that_is_not_finite_gives_nan_under_a_cap_c30(each_ops: Ops, dtype: torch.dtype, bad: float) -> None:
    case = PagedCase(**RAGGED, q_heads=2, softcap=2.0, dtype=dtype)
    expected = case.run(each_ops)
    case.queries[1][60, 1, 3] = bad
    out = case.run(each_ops)
    assert out[61, 1].isnan().all()
    out[61, 1] = expected[61, 1]
    assert_same_bits(out, expected)


def test_chunks_company_and_threads_change_no_bit_of_any_kind(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    case = PagedCase(**RAGGED, **kind, dtype=dtype)
    together, start = case.run(native), 0
    assert_same_bits(case.run(single_threaded), together)
    for i, length in enumerate(case.query_lens):
        assert_same_bits(case.run(native, [i]), together[start : start + length])
        start += length
    whole = PagedCase(seq_lens=[150], query_lens=[150], **kind, dtype=dtype)
    for chunk in (1, 7, 64):
        spans = [(a, min(a + chunk, 150)) for a in range(0, 150, chunk)]
        assert_same_bits(torch.cat([whole.run(native, until={0: span}) for span in spans]), whole.run(native))


def test_foreign_slots_never_influence_a_live_row_of_any_kind_c5(
    each_ops: Ops, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    case = PagedCase(**RAGGED, **kind, dtype=dtype)
    poisoned = case.run(each_ops)
    assert poisoned.isfinite().all()
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=0.0)
    assert_same_bits(case.run(each_ops), poisoned)


# 0, 1, 2, 4 and the extend 6 begin with the same 192 tokens, 1 and 2 with the same 640; 3 and 5 are alone.
SHARED = {
    "seq_lens": [200, 700, 1300, 90, 193, 64, 260],
    "query_lens": [1, 1, 1, 1, 1, 1, 50],
    "shares": ((1, 0, 192), (2, 0, 192), (4, 0, 192), (6, 0, 192), (2, 1, 640)),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("q_heads", [2, 6, 32])
def test_sequences_that_share_a_prefix_have_the_bits_that_they_have_alone(
    native: NativeOps, reference: Ops, dtype: torch.dtype, page_size: int, q_heads: int
) -> None:
    case = PagedCase(**SHARED, q_heads=q_heads, page_size=page_size, dtype=dtype)
    together, start = case.run(native), 0
    assert_close(together, case.run(reference))
    for i, length in enumerate(case.query_lens):
        assert_same_bits(case.run(native, [i]), together[start : start + length])
        start += length


def test_many_queries_over_one_prefix_equal_the_reference(
    native: NativeOps, single_threaded: NativeOps, reference: Ops, dtype: torch.dtype
) -> None:
    count, shared = 40, 576
    case = PagedCase(
        seq_lens=[shared + 1 + i for i in range(count)],
        query_lens=[1] * count,
        shares=tuple((i, 0, shared) for i in range(1, count)),
        q_heads=6,
        with_sinks=True,
        dtype=dtype,
    )
    together = case.run(native)
    assert_close(together, case.run(reference))
    assert_same_bits(case.run(single_threaded), together)
    assert_same_bits(case.run(native, [17]), together[17:18])


@pytest.mark.parametrize("sliding_window", [0, 600])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_long_sequence_has_the_same_bits_with_few_and_with_many_beside_it(
    native: NativeOps, reference: Ops, dtype: torch.dtype, sliding_window: int, queries: int
) -> None:
    others = 30
    case = PagedCase(
        seq_lens=[1600, *[20] * others],
        query_lens=[queries, *[1] * others],
        sliding_window=sliding_window,
        with_sinks=True,
        dtype=dtype,
    )
    alone = case.run(native, [0])
    assert_close(alone, case.run(reference, [0]))
    assert_same_bits(case.run(native)[:queries], alone)


def test_a_chunk_that_crosses_a_segment_has_the_bits_of_the_whole(native: NativeOps, dtype: torch.dtype) -> None:
    case = PagedCase(seq_lens=[1040], query_lens=[1040], q_heads=6, dtype=dtype)
    whole = case.run(native)
    for first, end in ((505, 520), (511, 512), (512, 513), (1020, 1040)):
        assert_same_bits(case.run(native, until={0: (first, end)}), whole[first:end])


SMALLER = {"8 bits": {"int8": True}, "16 bits": {"cache_dtype": torch.bfloat16}}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("smaller", SMALLER.values(), ids=SMALLER.keys())
@pytest.mark.parametrize("kind", [{}, {"head_dim": 12}, *KINDS.values()], ids=["plain", "small", *KINDS.keys()])
def test_caches_of_smaller_entries_equal_the_reference_in_any_batch(
    native: NativeOps,
    reference: Ops,
    dtype: torch.dtype,
    kind: dict[str, Any],
    smaller: dict[str, Any],
    page_size: int,
) -> None:
    case = PagedCase(**RAGGED, **kind, **smaller, page_size=page_size, dtype=dtype)
    together, start = case.run(native), 0
    assert together.isfinite().all()
    assert_close(together, case.run(reference))
    for i, length in enumerate(case.query_lens):
        assert_same_bits(case.run(native, [i]), together[start : start + length])
        start += length
    spans = [(a, min(a + 7, 70)) for a in range(0, 70, 7)]
    chunks = [case.run(native, [1], until={1: span}) for span in spans]
    assert_same_bits(torch.cat(chunks), case.run(native, [1]))


def test_8_bit_caches_lose_less_than_a_hundredth(native: NativeOps) -> None:
    exact, rounded = (PagedCase(**RAGGED, int8=int8).run(native) for int8 in (False, True))
    assert (rounded - exact).norm() < 0.01 * exact.norm()


# -- within segments --------------------------------------------------------------------------------------------------


def heads_of(tokens: int, dtype: torch.dtype, head_dim: int = 72) -> list[torch.Tensor]:
    """q, k and v of three heads, as views into one row of each token."""
    joined = normal((tokens, 9 * head_dim), dtype, seed=1)
    return [joined[:, i * 3 * head_dim :][:, : 3 * head_dim].view(tokens, 3, head_dim) for i in range(3)]


@pytest.mark.parametrize("lens", [(), (1,), (0, 5), (200, 3, 64, 0, 65)], ids=str)
def test_attention_within_segments_equals_that_of_each_alone(
    each_ops: Ops, dtype: torch.dtype, lens: tuple[int, ...]
) -> None:
    q, k, v = heads_of(sum(lens), dtype)
    out = each_ops.attention.paged_attention(q, KvCache(k, v), segments(lens, "cpu"), scale=0.3)
    assert out.shape == q.shape
    first = 0
    for length in lens:
        part = slice(first, first + length)
        one = [x[part].float().transpose(0, 1) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*one, scale=0.3).transpose(0, 1)
        assert_close(out[part], expected.to(dtype))
        alone = each_ops.attention.paged_attention(
            q[part], KvCache(k[part], v[part]), segments([length], "cpu"), scale=0.3
        )
        assert_same_bits(out[part], alone)
        first += length


def test_attention_within_segments_does_not_depend_on_threads_nor_on_earlier_calls(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    """One of more than 512 keys is read in several parts, where there are few others."""
    q, k, v = heads_of(600, dtype, head_dim=16)
    one = segments([600], "cpu")
    once = native.attention.paged_attention(q, KvCache(k, v), one, scale=0.3)
    assert_same_bits(
        single_threaded.attention.paged_attention(q, KvCache(k, v), segments([600], "cpu"), scale=0.3), once
    )
    native.attention.paged_attention(k, KvCache(v, q), one, scale=0.3)
    assert_same_bits(native.attention.paged_attention(q, KvCache(k, v), one, scale=0.3), once)


# -- in both directions within pictures -------------------------------------------------------------------------------

# Pictures at a sequence's beginning, across blocks of 64 keys, at a chunk's beginning and at its end.
PICTURES = {**RAGGED, "pictures": ((1, 0, 9), (1, 20, 70), (2, 20, 33), (4, 10, 64), (5, 70, 75), (5, 75, 129))}


@pytest.mark.parametrize("sliding_window", [0, 1, 30, 100])
def test_a_query_in_a_picture_sees_it_to_its_end(each_ops: Ops, dtype: torch.dtype, sliding_window: int) -> None:
    case = PagedCase(**PICTURES, sliding_window=sliding_window, with_sinks=True, dtype=dtype)
    out, start = case.run(each_ops), 0
    for i, (length, count) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        at = torch.arange(length)
        loc = case.page_table[i + 1, at // case.page_size].long() * case.page_size + at % case.page_size
        k, v = case.k_cache[loc].float(), case.v_cache[loc].float()
        assert case.sinks is not None
        for query in range(length - count, length):
            last = next((end - 1 for j, first, end in case.pictures if j == i and first <= query < end), query)
            seen = slice(max(0, query - sliding_window + 1) if sliding_window else 0, last + 1)
            q = case.queries[i][query].view(2, 2, -1).float()
            scores = torch.einsum("kgd,lkd->kgl", q, k[seen]) * case.head_dim**-0.5
            weights = torch.cat([scores, case.sinks.view(2, 2, 1)], dim=-1).softmax(dim=-1)[..., :-1]
            expected = torch.einsum("kgl,lkd->kgd", weights, v[seen]).reshape(4, -1)
            assert_close(out[start], expected.to(dtype))
            start += 1


def test_pictures_have_the_same_bits_in_any_batch_and_with_any_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    case = PagedCase(**PICTURES, **kind, dtype=dtype)
    together, start = case.run(native), 0
    assert_same_bits(case.run(single_threaded), together)
    for i, length in enumerate(case.query_lens):
        assert_same_bits(case.run(native, [i]), together[start : start + length])
        start += length


@pytest.mark.parametrize("sliding_window", [0, 40, 600])
def test_a_chunk_that_begins_in_a_picture_has_the_bits_of_the_whole(
    native: NativeOps, reference: Ops, dtype: torch.dtype, sliding_window: int
) -> None:
    sizes: dict[str, Any] = {"sliding_window": sliding_window, "q_heads": 6, "dtype": dtype}
    case = PagedCase(seq_lens=[700], query_lens=[700], pictures=((0, 3, 40), (0, 400, 690)), **sizes)
    whole = case.run(native)
    assert_close(whole, case.run(reference))
    for first, end in ((0, 40), (7, 40), (40, 400), (400, 690), (401, 690), (520, 695), (689, 700)):
        assert_same_bits(case.run(native, until={0: (first, end)}), whole[first:end])


def test_queries_outside_of_pictures_have_the_bits_of_causal_attention(native: NativeOps, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"seq_lens": [150], "query_lens": [150], "sliding_window": 90, "dtype": dtype}
    case = PagedCase(**sizes, pictures=((0, 70, 130),))
    out, causal = case.run(native), PagedCase(**sizes).run(native)
    for part in (slice(0, 70), slice(129, 150)):
        assert_same_bits(out[part], causal[part])
    assert not torch.equal(out[70:129], causal[70:129])


def test_layers_with_and_without_attention_within_pictures_have_plans_of_their_own(native: NativeOps) -> None:
    case = PagedCase(seq_lens=[90], query_lens=[90], pictures=((0, 10, 80),))
    q, ahead = case.queries[0], torch.zeros(90, dtype=torch.int32)
    ahead[10:80] = torch.arange(70).flip(0)
    both = case.paged
    for given in (None, ahead, None, ahead):
        out = native.attention.paged_attention(q, case.cache, both, scale=0.1, ahead=given)
        assert_same_bits(out, native.attention.paged_attention(q, case.cache, case.paged, scale=0.1, ahead=given))
