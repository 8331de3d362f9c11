"""The GPU's kernels equal the reference: without a GPU in Triton's interpreter, with one on it (`pytest -m gpu`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.reference.accept import Known
from forebay.ops.reference.attention import KvCache, segments
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.sampling import Draws
from tests.ops.chunks import SMALL, clear_stale, slots_of, states_of
from tests.ops.helpers import PagedCase, assert_same_bits, no_sequences, normal
from tests.ops.recurrences import CASES, Conv, cut, joined, state_batch
from tests.ops.test_steps import VOCAB, step_of
from tests.ops.triton_device import HAS_GPU, ON_EACH_DEVICE, OnDevice, TritonOps, assert_close, attention
from tests.ops.verifying import NUM_SLOTS, RAGGED, decode, verify

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that runs one program at a time."""
    if not HAS_GPU:
        monkeypatch.setattr(attention, "_PROGRAMS", 8)


@pytest.fixture(scope="module")
def reference() -> Ops:
    """Once, not for each variant of the native kernels: nothing here is compared with those."""
    return Ops(1)


@pytest.fixture(scope="module")
def ops(device: str) -> OnDevice:
    return OnDevice(TritonOps(device, 1), device)


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 97), (3, 64)])
def test_norms_equal_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = normal((rows, width), dtype, seed=1), normal((width,), dtype, seed=2)
    assert_close(ops.norms.rms_norm(x, weight, 1e-5), reference.norms.rms_norm(x, weight, 1e-5))
    ours = normal((rows, width), dtype, seed=3)
    theirs = ours.clone()
    assert_close(ops.norms.add_rms_norm(x, ours, weight, 1e-5), reference.norms.add_rms_norm(x, theirs, weight, 1e-5))
    assert_close(ours, theirs)


def test_norm_of_heads_inside_a_wider_row(ops: Ops, reference: Ops, dtype: torch.dtype) -> None:
    heads = normal((3, 10 * 24), dtype, seed=1)[:, 48:168].view(3, 5, 24)
    weight = normal((24,), dtype, seed=2)
    assert_close(ops.norms.rms_norm(heads, weight, 1e-6), reference.norms.rms_norm(heads, weight, 1e-6))
    for own in (weight, normal((5, 24), dtype, seed=3)):
        for bias in (None, own + 1):
            assert_close(
                ops.norms.layer_norm(heads, own, bias, 1e-6), reference.norms.layer_norm(heads, own, bias, 1e-6)
            )


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 97), (3, 64)])
def test_layer_norms_equal_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = normal((rows, width), dtype, seed=1) + 3, normal((width,), dtype, seed=2)
    for bias in (None, normal((width,), dtype, seed=3)):
        assert_close(ops.norms.layer_norm(x, weight, bias, 1e-5), reference.norms.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("group", "shared"), [(24, False), (8, True), (6, False)])
def test_gated_norms_equal_the_reference(
    ops: Ops, reference: Ops, dtype: torch.dtype, norm_first: bool, group: int, shared: bool
) -> None:
    both = normal((3, 48), dtype, seed=1)
    x, gate = both[:, :24], both[:, 24:]
    weight = normal((group if shared else 24,), dtype, seed=2)
    norm = GatedNorm(weight, 1e-5, group, norm_first, sigmoid=not norm_first)
    assert_close(ops.norms.gated_rms_norm(x, gate, norm), reference.norms.gated_rms_norm(x, gate, norm))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_activations_equal_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype, rows: int) -> None:
    x = normal((rows, 86), dtype, seed=1, scale=2)
    calls = {
        "silu_and_mul": ((), {}),
        "gelu_and_mul": ((), {"exact": True}),
        "clamped_swiglu": ((), {"alpha": 1.702, "limit": 1.5}),
        "relu2": ((), {}),
        "xielu": ((), {"alpha_p": 0.8, "alpha_n": 1.3, "beta": 0.5, "eps": -1e-6}),
        "gelu": ((), {}),
        "mul_silu": ((normal((rows, 86), dtype, seed=2),), {}),
        "mul_sigmoid": ((normal((rows, 2), dtype, seed=2),), {}),
    }
    for name, (more, options) in calls.items():
        ours, theirs = (getattr(each.elementwise, name) for each in (ops, reference))
        assert_close(ours(x, *more, **options), theirs(x, *more, **options))
    assert_close(ops.elementwise.gelu_and_mul(x), reference.elementwise.gelu_and_mul(x))
    assert_close(ops.elementwise.gelu(x, exact=True), reference.elementwise.gelu(x, exact=True))


# -- around the model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_where_tokens_stand_and_what_is_accepted_equal_the_reference(ops: Ops, reference: Ops, seed: int) -> None:
    step = step_of(seed, width=seed % 4)
    rows, q_start, kv_lens, pages, drafts, last_tokens = step
    kv_lens[1:3] = torch.tensor([-5, 1 << 40])
    placed, expected = (o.steps.place_tokens(rows, q_start, kv_lens, pages, step.num_tokens) for o in (ops, reference))
    for ours, theirs in zip(placed, expected, strict=True):
        assert_same_bits(ours, theirs)
    given = torch.stack([expected.positions - 2, expected.positions, expected.positions + 1], dim=1)
    deltas = -torch.arange(len(kv_lens))
    for own in (None, given):
        assert_same_bits(
            *(o.steps.rope_positions(expected.positions, own, rows, q_start, deltas) for o in (ops, reference))
        )
    page_map = torch.randint(0, 9, (90,), generator=torch.Generator().manual_seed(seed)).int()
    assert_same_bits(
        *(o.steps.map_locations(expected.out_cache_loc, page_map, pages.page_size) for o in (ops, reference))
    )
    known = Known(kv_lens, last_tokens, drafts)
    ids = [o.steps.decode_ids(rows, q_start, known, step.num_tokens, VOCAB) for o in (ops, reference)]
    assert_same_bits(*ids)
    chosen = torch.cat([ids[0][1:], torch.tensor([7])]) if step.num_tokens else ids[0]
    finite = chosen % 5 > 0
    slots, lens = torch.arange(len(chosen), dtype=torch.int32), expected.positions + chosen % 2
    ends = torch.randint(0, len(chosen) + 1, (len(chosen),), generator=torch.Generator().manual_seed(seed)).int()
    due = [o.steps.due(slots, ends, lens, expected.positions) for o in (ops, reference)]
    assert_same_bits(*due)
    results = []
    for o in (ops, reference):
        last, far = last_tokens.clone(), kv_lens.clone()
        num_new = o.steps.accept(chosen, finite, expected.positions, rows, q_start, Known(far, last, drafts))
        o.steps.advance(far, rows, q_start)
        results.append((num_new, last[1:], far[1:]))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


# -- attention --------------------------------------------------------------------------------------------------------

ATTENTION = {
    "decode": {"seq_lens": [1, 21, 9], "query_lens": [1, 1, 1]},
    "decode-in-segments": {"seq_lens": [600, 3], "query_lens": [1, 1], "page_size": 16, "head_dim": 16},
    "extend": {"seq_lens": [5, 40, 23], "query_lens": [5, 17, 1]},
    "empty-among-others": {"seq_lens": [7, 12, 8], "query_lens": [7, 0, 2]},
    "as-many-queries-as-sequences": {"seq_lens": [7, 12], "query_lens": [2, 0]},
    "odd-group": {"seq_lens": [30, 11], "query_lens": [1, 9], "q_heads": 9, "kv_heads": 3, "page_size": 1},
    "window": {"seq_lens": [40, 3], "query_lens": [1, 1], "sliding_window": 6, "with_sinks": True, "mapped": True},
    "window-extend": {"seq_lens": [40, 25], "query_lens": [33, 1], "sliding_window": 6, "with_sinks": True},
    "cap": {"seq_lens": [40, 3], "query_lens": [1, 1], "softcap": 0.7, "with_sinks": True},
    "cap-extend": {"seq_lens": [40, 25], "query_lens": [33, 1], "softcap": 0.7, "int8": True}
    | {"sliding_window": 6, "with_sinks": True},
    "latent": {"seq_lens": [9, 30], "query_lens": [1, 1], "kv_heads": 1, "head_dim": 40, "v_dim": 32, "latent": True},
    "values-of-another-size": {"seq_lens": [9, 30], "query_lens": [4, 1], "head_dim": 24, "v_dim": 16},
    "int8": {"seq_lens": [21, 9], "query_lens": [1, 1], "int8": True},
    "int8-latent": {"seq_lens": [9, 30], "query_lens": [4, 1], "kv_heads": 1, "head_dim": 40, "v_dim": 32}
    | {"latent": True, "int8": True},
    "fp8": {"seq_lens": [21, 9], "query_lens": [1, 1], "fp8": True},
    "fp8-extend": {"seq_lens": [40, 25], "query_lens": [33, 1], "sliding_window": 6, "with_sinks": True, "fp8": True},
    "fp8-latent": {"seq_lens": [9, 30], "query_lens": [4, 1], "kv_heads": 1, "head_dim": 40, "v_dim": 32}
    | {"latent": True, "fp8": True},
    "pictures": {"seq_lens": [70, 30, 9], "query_lens": [65, 10, 1]}
    | {"pictures": ((0, 5, 30), (0, 31, 69), (1, 22, 30))},
    "pictures-in-a-window": {"seq_lens": [70, 30], "query_lens": [60, 9], "sliding_window": 12, "with_sinks": True}
    | {"pictures": ((0, 10, 30), (0, 31, 69), (1, 3, 29))},
    "nobody": {"seq_lens": [], "query_lens": []},
}


@pytest.mark.quick(12)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_equals_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype, case: str) -> None:
    paged = PagedCase(**{"page_size": 4, "head_dim": 32, **ATTENTION[case]}, dtype=dtype, seed=len(case))
    if not paged.seq_lens:
        q = torch.empty(0, 4, 32, dtype=dtype)
        assert ops.attention.paged_attention(q, paged.cache, no_sequences(), scale=1.0).shape == (0, 4, 32)
        return
    assert_close(paged.run(ops), paged.run(reference))


@pytest.mark.whole
@pytest.mark.parametrize("window", [0, 100], ids=["causal", "window"])
def test_attention_equals_the_reference_where_a_block_of_keys_begins_to_need_a_mask(
    ops: Ops, reference: Ops, window: int
) -> None:
    """A block has 64 keys. Of three queries, the first sees the whole block, or just not; or the last does."""
    lens = [end + window for end in (64, 65, 66, 67)]
    shape = {"head_dim": 16, "kv_heads": 1, "softcap": 0.7, "with_sinks": True}
    paged = PagedCase(**shape, seq_lens=lens, query_lens=[3] * 4, sliding_window=window, seed=3)
    assert_close(paged.run(ops), paged.run(reference))


@pytest.mark.parametrize("lens", [(70, 63, 0, 33), (1, 1)])
def test_attention_within_segments_equals_the_reference(
    ops: Ops, reference: Ops, dtype: torch.dtype, lens: tuple[int, ...]
) -> None:
    q, k, v = normal((sum(lens), 3 * 2 * 24), dtype, seed=1).view(-1, 6, 24).split(2, dim=1)
    within = segments(lens, "cpu")
    expected = reference.attention.paged_attention(q, KvCache(k, v), within, scale=0.3)
    assert_close(ops.attention.paged_attention(q, KvCache(k, v), within, scale=0.3), expected)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.4])
def test_sparse_mixer_equals_the_reference_and_no_other_row_changes_it(ops: Ops, reference: Ops, jitter: float) -> None:
    """Padding lanes are no experts: there are 12. Of equal ones the first is chosen, and NaN last."""
    logits = normal((9, 12), torch.float32, seed=1, scale=2)
    logits[3] -= 20.0
    logits[4, :3] = logits[4, 5] = 7.0
    logits[5, 2], logits[6, 1:], logits[7] = NAN, NAN, NAN
    ids, weights = ops.experts.sparse_mixer(logits, jitter)
    their_ids, their_weights = reference.experts.sparse_mixer(logits, jitter)
    assert_same_bits(ids, their_ids)
    torch.testing.assert_close(weights, their_weights, equal_nan=True)
    alone = ops.experts.sparse_mixer(logits[2:3].clone(), jitter)
    assert_same_bits(alone[1], weights[2:3])
    assert ops.experts.sparse_mixer(logits[:0], jitter)[0].shape == (0, 2)


@pytest.mark.quick(1)
def test_a_decoding_sequence_does_not_depend_on_the_others(ops: Ops, dtype: torch.dtype) -> None:
    paged = PagedCase(seq_lens=[300, 7, 33], query_lens=[1, 1, 1], head_dim=16, dtype=dtype)
    together = paged.run(ops)
    for i in range(3):
        assert_same_bits(paged.run(ops, [i]), together[i : i + 1])


@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (20, 8)])
def test_rope_equals_the_reference_in_place(
    ops: Ops, reference: Ops, dtype: torch.dtype, head_dim: int, rotary: int
) -> None:
    angles = normal((30, rotary // 2), torch.float32, seed=1)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.tensor([0, 29, 7])
    ours = normal((3, 8 * head_dim), dtype, seed=3)
    theirs = ours.clone()
    for which, qkv in ((ops, ours), (reference, theirs)):
        q = qkv[:, : 5 * head_dim].view(3, 5, head_dim)
        k = qkv[:, 5 * head_dim : 7 * head_dim].view(3, 2, head_dim)
        which.attention.apply_rope(q, k, positions, cos_sin)
    assert_close(ours, theirs)
    assert_same_bits(ours[:, 7 * head_dim :], theirs[:, 7 * head_dim :])


def test_rope_with_axes_equals_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype) -> None:
    angles = normal((30, 6), torch.float32, seed=1)
    cos_sin, axes = torch.cat([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    positions = torch.tensor([[0, 29, 7], [1, 2, 3], [9, 8, 7]])
    for num_kv_heads in (0, 2):
        results = []
        for which in (ops, reference):
            q, k = (normal((3, num, 16), dtype, seed=num) for num in (5, num_kv_heads))
            which.attention.apply_rope(q, k, positions, cos_sin, axes=axes)
            results.append((q, k))
        for ours, theirs in zip(*results, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize(("rows", "width"), [(0, 40), (3, 40), (2, 1100)])
def test_scale_rows_equals_the_reference_in_place(
    ops: Ops, reference: Ops, dtype: torch.dtype, rows: int, width: int
) -> None:
    ours, table = normal((rows, width + 7), dtype, seed=1), normal((9,), torch.float32, seed=2)
    theirs, at = ours.clone(), torch.arange(rows) * 5 % 9
    ops.elementwise.scale_rows_(ours[:, 3 : 3 + width], table, at)
    reference.elementwise.scale_rows_(theirs[:, 3 : 3 + width], table, at)
    assert_close(ours, theirs)
    assert_same_bits(ours[:, 3 + width :], theirs[:, 3 + width :])


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_store_kv_writes_the_given_slots_and_no_others(ops: Ops, dtype: torch.dtype, tokens: int) -> None:
    loc = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:tokens]
    kv = normal((tokens, 2 * (12 + 8)), dtype, seed=2)
    k, v = kv[:, :24].view(tokens, 2, 12), kv[:, 24:].view(tokens, 2, 8)
    caches = [normal((20, 2, size), dtype, seed=3) for size in (12, 8)]
    expected = [cache.clone() for cache in caches]
    expected[0][loc], expected[1][loc] = k, v
    ops.attention.store_kv(k, v, KvCache(*caches), loc)
    for cache, wanted in zip(caches, expected, strict=True):
        assert_same_bits(cache, wanted)


def test_store_kv_of_values_within_keys(ops: Ops, dtype: torch.dtype) -> None:
    latent = normal((3, 1, 40 + 9), dtype, seed=2)[..., :40]
    k_cache = normal((9, 1, 40), dtype, seed=3)
    expected, loc = k_cache.clone(), torch.tensor([3, 1, 4])
    expected[loc] = latent
    ops.attention.store_kv(latent, latent[..., :32], KvCache(k_cache, k_cache[..., :32]), loc)
    assert_same_bits(k_cache, expected)


@pytest.mark.parametrize("bad", [NAN, float("-inf")])
def test_the_value_of_a_key_that_is_not_finite_is_nan(ops: Ops, dtype: torch.dtype, bad: float) -> None:
    k, v, loc = normal((4, 2, 12), dtype, seed=1), normal((4, 2, 8), dtype, seed=2), torch.tensor([3, 1, 6, 7])
    k[2, 1, 5], v[0, 0, 0] = bad, -0.0
    k_cache, v_cache = torch.zeros(9, 2, 12, dtype=dtype), torch.zeros(9, 2, 8, dtype=dtype)
    ops.attention.store_kv(k, v, KvCache(k_cache, v_cache), loc)
    for cache, wanted in ((k_cache, k), (v_cache, v)):
        assert_same_bits(cache[loc[[0, 1, 3]]], wanted[[0, 1, 3]])
    assert v_cache[6].isnan().tolist() == [[False] * 8, [True] * 8]
    ops.attention.store_kv(k, k[..., :8], KvCache(k_cache, k_cache[..., :8]), loc)
    assert k_cache[6].isnan().tolist() == [[False] * 12, [True] * 12]
    if bad == float("-inf"):
        return  # the interpreter warns of inf / inf, whose code nobody reads
    scales = [torch.zeros(9, 2) for _ in range(2)]
    ops.attention.store_kv(k, v, KvCache(k_cache.to(torch.int8), v_cache.to(torch.int8), *scales), loc)
    assert scales[1][loc].isnan().tolist() == [[False, False], [False, False], [False, True], [False, False]]


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "fp8"])
def test_eight_bit_kv_is_written_as_the_reference_writes_it(
    ops: Ops, reference: Ops, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """A head of zeros has the scale 0, and one with a NaN the scale NaN: reading it gives NaN."""
    k, v = normal((4, 2, 12), dtype, seed=1), normal((4, 2, 8), dtype, seed=2)
    k[1, 0], v[2, 1, 3] = 0, NAN
    loc = torch.tensor([3, 1, 6, 7])
    caches = [
        [torch.zeros(9, 2, size, dtype=codes) for size in (12, 8)] + [torch.zeros(9, 2) for _ in range(2)]
        for _ in range(2)
    ]
    for which, cache in zip((ops, reference), caches, strict=True):
        which.attention.store_kv(k, v, KvCache(*cache), loc)
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_fp8_kv_is_rounded_to_the_nearest_code_of_all(ops: Ops, reference: Ops) -> None:
    """Numbers that are codes, those between two of them, and their neighbours; the largest sets the scale to 1."""
    positive = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (positive[1:] + positive[:-1]) / 2
    most = torch.tensor(INF)
    numbers = torch.cat([positive, between, between.nextafter(most), between.nextafter(-most)])
    k = torch.cat([numbers, -numbers]).view(1, 1, -1)
    written = []
    for which in (ops, reference):
        cache, scales = torch.zeros(2, 1, k.shape[2], dtype=torch.uint8), torch.zeros(2, 1)
        which.attention.store_kv(k, k, KvCache(cache, cache.clone(), scales, scales.clone()), torch.tensor([1]))
        written.append(cache[1].view(torch.float8_e4m3fn).float())
        assert scales[1].item() == 1.0
    assert_same_bits(*written)


# -- recurrences ------------------------------------------------------------------------------------------------------

LENS, SLOTS, BEFORE = [3, 0, 1, 19, 1], [5, 2, 0, 1, 4], [14, 3, 0, 5, 31]
# Entries with slot 0 are no snapshots, wherever they say that they end.
SNAPSHOTS = [[(10**6, 0), (2, 9), (3, 0)], [], [], [(1, 10), (5, 11), (4, 0), (17, 12)], [(-5, 0)]]
RECURRENCES = {name: case for name, case in CASES.items() if "wide" not in name}
RECURRENCES |= {f"small-{name}": case for name, case in SMALL.items()}
FEW = ("conv", "conv-of-2", "mamba1-odd", "small-mamba2", "small-delta", "small-kda")  # the last is a delta rule, too
READ = {5: 17, 1: 24, 4: 32, 9: 16, 10: 6, 11: 10, 12: 22}  # tokens by slot, behind such a step
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.quick(24)
@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow][: name not in FEW]) for name in RECURRENCES],
)
def test_recurrences_equal_the_reference(
    ops: Ops, reference: Ops, name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Outputs, states and snapshots, of which slot 0 gets none whatever it holds (C14)."""
    case, (dtype, state_dtype) = RECURRENCES[name], dtypes
    if isinstance(case, Conv):
        state_dtype = dtype
    inputs = joined([case.inputs(length, dtype, seed=100 * i) for i, length in enumerate(LENS)])
    batch = state_batch(LENS, SLOTS, SNAPSHOTS, before=BEFORE)
    ours = slots_of(case, 13, state_dtype, dtype, seed=7)
    theirs = states_of(case, ours, dict(zip(SLOTS, BEFORE, strict=True)), inputs).clone()
    ours[0] = NAN
    out, expected = case.call(ops, inputs, ours, batch), case.call(reference, inputs, theirs, batch)
    live = torch.cat([torch.full((n,), slot > 0) for n, slot in zip(LENS, SLOTS, strict=True)])
    assert_close(out[live], expected[live], state_dtype=state_dtype)
    states, written = states_of(case, ours, READ, inputs), list(READ)
    assert_close(states[written], theirs[written], state_dtype=state_dtype)
    assert ours[0].isnan().all()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow][: name not in FEW[1:4]]) for name in RECURRENCES],
)
def test_c16_after_a_verify_every_slot_is_as_plain_decode_steps_leave_it(ops: Ops, name: str) -> None:
    case = RECURRENCES[name]
    inputs = [case.inputs(seq.num_tokens, torch.float32, seed=i) for i, seq in enumerate(RAGGED)]
    verified = slots_of(case, NUM_SLOTS, torch.float32, torch.float32, seed=7)
    verified[0] = NAN
    decoded = verified.clone()
    verify(ops, case, inputs, verified, RAGGED)
    decode(ops, case, inputs, decoded, RAGGED)
    assert verified[0].isnan().all()
    lengths = {seq.slot: seq.start + seq.num_new for seq in RAGGED if seq.slot}
    lengths |= {seq.wish_slot: seq.wish for seq in RAGGED if seq.start < seq.wish <= seq.start + seq.num_new}
    ours, theirs = (clear_stale(case, table, lengths, inputs[0]) for table in (verified, decoded))
    assert_same_bits(ours[1:], theirs[1:])


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("length", "begins"),
    [
        pytest.param(19, (3, 15, 16), id="near-the-end-of-a-chunk"),
        pytest.param(35, range(1, 35), id="each", marks=pytest.mark.slow),
    ],
)
def test_c31_a_scan_in_chunks_has_the_same_bits_wherever_a_step_begins_and_ends(
    ops: Ops, name: str, length: int, begins: Sequence[int]
) -> None:
    """A prompt at once leaves snapshots. From each of them a decode, a window to verify and the rest of the prompt give
    the prompt's own bits, and leave its own states, which are bfloat16."""
    case = SMALL[name]
    inputs = case.inputs(length, torch.bfloat16, seed=3)
    table = slots_of(case, length + 2, torch.bfloat16, torch.bfloat16, seed=7)
    ends_of = {width: [min(begin + width, length) for begin in begins] for width in (1, 5, length)}
    behind = {n + 1: n for n in sorted({*begins, *chain(*ends_of.values())} - {length})}
    whole = case.call(ops, inputs, table, state_batch([length], [1], [[(n, slot) for slot, n in behind.items()]]))
    for ends in ends_of.values():
        after = table.clone()
        lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        tokens = joined([cut(inputs, begin, end) for begin, end in zip(begins, ends, strict=True)])
        slots = [begin + 1 for begin in begins]
        out = case.call(ops, tokens, after, state_batch(lens, slots, before=begins))
        expected = torch.cat([whole[begin:end] for begin, end in zip(begins, ends, strict=True)])
        assert_same_bits(out, expected)
        came_to = dict(zip(slots, ends, strict=True))
        ours, theirs = clear_stale(case, after, came_to, inputs), clear_stale(case, table, behind | {1: length}, inputs)
        for slot, end in came_to.items():
            assert_same_bits(ours[slot], theirs[1 if end == length else end + 1])


@pytest.mark.parametrize("name", ["conv", "mamba1"])
def test_c31_a_recurrence_has_the_same_bits_however_its_tokens_come(ops: Ops, name: str) -> None:
    """At once, token by token, in parts that begin anywhere, beside other sequences. States are bfloat16."""
    case, length = CASES[name], 7
    inputs, other = (case.inputs(length, torch.bfloat16, seed=seed) for seed in (3, 4))
    table = slots_of(case, 3, torch.bfloat16, torch.bfloat16, seed=7)
    whole = table.clone()
    out = case.call(ops, inputs, whole, state_batch([length], [1], before=[12]))
    state, parts = table.clone(), []
    for start, end in pairwise([0, 1, 3, length]):
        both = joined([cut(other, start, end), cut(inputs, start, end)])
        batch = state_batch([end - start] * 2, [2, 1], before=[start, 12 + start])
        parts.append(case.call(ops, both, state, batch)[end - start :])
    assert_same_bits(torch.cat(parts), out)
    assert_same_bits(*(clear_stale(case, slots, {1: 12 + length}, inputs)[1] for slots in (state, whole)))


@pytest.mark.parametrize("lens", [[], [0, 0]], ids=str)
def test_recurrences_without_tokens_leave_states_alone(ops: Ops, lens: list[int]) -> None:
    for case in CASES.values():
        state = slots_of(case, 4, torch.float32, torch.float32, seed=7)
        before = state.clone()
        out = case.call(ops, case.inputs(0, torch.float32, seed=0), state, state_batch(lens, [1, 2][: len(lens)]))
        assert len(out) == 0
        assert_same_bits(state, before)


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 1), (4, 97), (2, 4099)])
def test_argmax_equals_the_reference(ops: Ops, reference: Ops, rows: int, width: int) -> None:
    logits = normal((rows, width), torch.float32, seed=1).round()  # most rows have several maxima
    for ours, theirs in zip(ops.sampling.argmax_rows(logits), reference.sampling.argmax_rows(logits), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("width", [1, 97, 4099])
def test_masked_logits_are_the_reference_s(ops: Ops, reference: Ops, width: int) -> None:
    ours, at = normal((5, width), torch.float32, seed=1), torch.tensor([4, 0, 2])
    theirs = ours.clone()
    words = torch.randint(-(2**31), 2**31, (3, -(-width // 32)), generator=torch.Generator().manual_seed(2))
    for logits, backend in ((ours, ops), (theirs, reference)):
        backend.sampling.mask_logits(logits, at, words.to(torch.int32))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("at", [0, -1])
def test_argmax_and_sampling_flag_rows_that_are_not_finite(ops: Ops, at: int) -> None:
    logits = normal((5, 37), torch.float32, seed=1)
    logits[1, at], logits[2, at] = NAN, INF
    logits[3] = -INF
    logits[4, 1:] = -INF
    ids, finite = ops.sampling.argmax_rows(logits)
    assert finite.tolist() == [True, False, False, False, True]
    assert ids.tolist()[1:] == [0, 0, 0, 0]
    ones = torch.ones(5)
    drawn = ops.sampling.sample_rows(logits, Draws(ones.double() / 2, ones, ones.long() * 3, ones / 2, ones / 9))
    assert drawn.tolist()[1:] == [0, 0, 0, 0]


@pytest.mark.parametrize("vocab", [1, 60])
def test_a_drawn_token_is_the_reference_s(ops: Ops, reference: Ops, vocab: int) -> None:
    """But where the running sum passes the random number so closely that the last bit of an exp decides."""
    rows, generator = 8, torch.Generator().manual_seed(vocab)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=generator)]

    logits = normal((rows, vocab), torch.float32, seed=vocab, scale=2).mul(4).round() / 4  # with ties
    columns = pick([0.3, 1.0, 4.0]), pick([0, 1, 30, 10**6]), pick([0.2, 0.95, 1.0]), pick([0, 0.01])
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    draws = Draws(uniform, *columns)
    differ = ops.sampling.sample_rows(logits, draws) != reference.sampling.sample_rows(logits, draws)
    assert int(differ.sum()) <= 1


def test_a_drawn_token_is_never_an_excluded_one(ops: Ops) -> None:
    logits = normal((4, 50), torch.float32, seed=3)
    uniform = torch.tensor([0.0, 0.3, 0.9, 1 - 2.0**-53], dtype=torch.float64)
    ones = torch.ones(4)
    drawn = ops.sampling.sample_rows(logits, Draws(uniform, ones, ones.long() * 2))
    best_two = logits.topk(2, dim=-1).indices
    assert (drawn.unsqueeze(1) == best_two).any(dim=1).all()


def test_ops_on_another_device_are_those_of_a_group_and_what_they_write_comes_back(reference: Ops) -> None:
    """Of a device that is the same one by another name, so that the way of a GPU's tests is gone without a GPU."""
    elsewhere = OnDevice(reference, "cpu:0")
    x, weight = normal((3, 16), torch.float32, seed=1), normal((16,), torch.float32, seed=2)
    residual, expected = x.clone(), x.clone()
    result = elsewhere.norms.add_rms_norm(x, residual, weight, 1e-5)
    assert_same_bits(result, reference.norms.add_rms_norm(x, expected, weight, 1e-5))
    assert_same_bits(residual, expected)
    assert elsewhere.name == reference.name
