"""Calls of the ops, a few of each kernel, whose results two variants must agree on.

A new kernel is one more entry of CASES: a function of the ops and of the dtype of its inputs, which returns what the
kernel wrote. Kernels that no entry calls are named in UNTOUCHED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from forebay.formats.held_format import QUANTIZED_FORMATS
from forebay.formats.quantize import unwritten
from forebay.ops.interface import Ops
from forebay.ops.reference.adapters import PANEL, AdapterTable, panels_of
from forebay.ops.reference.attention import KvCache, segments
from forebay.ops.reference.experts import ExpertActivation, Gating, Scoring
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.pictures import PixelScale
from forebay.ops.reference.recurrence import DeltaGates
from forebay.ops.reference.sampling import Draws
from tests.formats.coded import FORMATS, random_codes, stored
from tests.ops.helpers import PagedCase, normal, to_int8
from tests.ops.recurrences import CASES as RECURRENCES
from tests.ops.recurrences import Conv, joined, state_batch, state_table
from tests.ops.test_compression import PAGE, Step, hows
from tests.ops.test_streams import mixing
from tests.ops.tiers import TierCase, random_steps

F32, BF16 = torch.float32, torch.bfloat16
ROWS: Final = 5  # of inputs: blocks of four rows and of one
Call = Callable[[Ops, torch.dtype], Iterator[Tensor]]

# Kernels without vectors, which are compiled alike for every processor: the rows and tokens of steps, and recordings.
UNTOUCHED: Final = frozenset(
    {"accept", "accepted_stops", "advance", "clear_rows", "decode_ids", "due", "follow", "gather", "gather_rows"}
    | {"keep_drafts", "map_locations", "mask_logits", "place_tokens", "scatter", "scatter_rows", "token_pages"}
    | {"plan_blocks", "entry_pages", "selected_lens", "of_tokens", "replace_rows", "rope_positions"}
    | {"copy_rows", "fill", "cpu_init", "attention_plan_destroy"}
    | {"pool_destroy", "pool_barriers", "pool_shares", "touch"}
    | {f"recording_{call}" for call in ("create", "destroy", "length", "record", "replay")}
    # Reads files, which the emulator's process does not have: numbers are converted as everywhere.
    | {"ngram_rows_{}"}
    # Of processes that share memory: they copy bytes and places.
    | {
        f"exchange_{call}"
        for call in ("bytes", "create", "destroy", "lost", "end", "gather", "rows", "places", "spread")
    }
)


def _dense(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Of layers without codes: whole blocks, and parts of rows, of vectors and of panels."""
    for rows, inputs, outputs in ((ROWS, 75, 70), (1, 64, 32)):
        x, weight = normal((rows, inputs + 3), dtype, seed=1)[:, 3:], normal((outputs, inputs), dtype, seed=2)
        layer = ops.linear.pack(weight, normal((outputs,), dtype, seed=3))
        yield ops.linear.apply(x, layer)
        yield ops.linear.apply_f32(x, layer)


def _widened(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Of weights in bfloat16 with inputs in float32."""
    weight = normal((70, 75), BF16, seed=2)
    yield ops.linear.apply(normal((ROWS, 75), F32, seed=1), ops.linear.pack(weight, inputs=F32))
    yield ops.linear.embedding(torch.tensor([4, 0, 69]), weight, F32)


def _heads(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    weights = [ops.linear.pack(normal((20, 23), dtype, seed=h)) for h in range(3)]
    yield ops.experts.linear_heads(normal((ROWS, 3, 23), dtype, seed=9), ops.experts.pack_heads(weights))


def _adapters(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Of ranks with and without a whole group of rows, and one and more tokens of a slot."""
    panels = panels_of([0] * 70 + [1] * 20)
    ranks = torch.tensor([[0, 0], [9, 3], [0, 4]], dtype=torch.int32)
    for held in {dtype, BF16}:
        a, b = normal((3, 2, 9, 75), held, seed=1), normal((3, len(panels), 9, PANEL), held, seed=2)
        out = normal((ROWS, 90), dtype, seed=3)
        table, slots = AdapterTable(a, b, ranks, torch.tensor(panels, dtype=torch.int32)), torch.tensor([1, 0, 2, 1, 1])
        ops.adapters.add(out, normal((ROWS, 75), dtype, seed=4), slots.int(), table)
        yield out


def _codes(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    for form in FORMATS.values():
        inputs = 2 * max(form.group, 64)
        table = ops.linear.pack_quantized(stored(random_codes(form, 40, inputs, seed=1)))
        yield ops.linear.embedding_packed(torch.tensor([0, 39, 17]), table, dtype)
        for rows in (ROWS, 2):
            yield ops.linear.apply(normal((rows, inputs), dtype, seed=rows), table)
    yield ops.linear.apply_f32(normal((3, inputs), dtype, seed=3), table)


def _quantizing(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Rows of every stored type, and zeros."""
    values = (normal((ROWS, 96), dtype, seed=1) * torch.tensor([1e-6, 1.0, 30.0, 0.0, 2.0]).unsqueeze(1)).to(dtype)
    stored_values = values.view(torch.uint16) if dtype == BF16 else values
    for numbers in (stored_values, values.half()):
        for form in QUANTIZED_FORMATS.values():
            out = unwritten(form, ROWS, 96)
            ops.linear.quantize_into(numbers.numpy(), out, 0)
            parts = (out.codes, out.scales.view(np.uint16), out.minimums)
            yield from (torch.from_numpy(part).view(torch.uint8) for part in parts if part is not None)


def _experts(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    form = FORMATS["Q4_0"]
    first, second = (
        [ops.linear.pack_quantized(stored(random_codes(form, outputs, inputs, seed=e))) for e in range(3)]
        for outputs, inputs in ((64, 64), (64, 32))
    )
    ids = torch.tensor([[0, 2], [1, 2], [2, 0], [1, 0], [0, 1]])
    for activation in (ExpertActivation.SILU_AND_MUL, ExpertActivation.CLAMPED_SWIGLU):
        experts = ops.experts.pack_experts(first, second, activation, alpha=1.7, limit=1.5)
        x, weights = normal((ROWS, 64), dtype, seed=1), torch.full(ids.shape, 0.37)
        yield ops.experts.fused_experts(x, experts, ids, weights)
        yield (inner := ops.experts.experts_inside(x, experts, ids))
        yield ops.experts.experts_outside(inner, experts, ids, weights)


def _gating(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    yield from ops.experts.sparse_mixer(normal((ROWS, 12), F32, seed=1), 0.1)
    for scoring in Scoring:
        gating = Gating(num_experts_per_tok=3, scoring=scoring, normalize=True, groups=4, best_groups=2)
        for summed in (1, 2):
            yield from ops.experts.topk_gating(normal((ROWS, 12), F32, seed=1), replace(gating, summed=summed))
        table = torch.tensor([[0, 5, 11], [7, 2, 3]])
        yield from ops.experts.hash_gating(normal((3, 12), F32, seed=2), torch.tensor([1, 0, 1]), table, gating)


def _attention(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    kinds: list[dict[str, Any]] = [
        {"int8": True},
        {"cache_dtype": BF16, "with_sinks": True},
        {"sliding_window": 17, "head_dim": 40},
        {"int8": True, "softcap": 0.7},
        {"cache_dtype": BF16, "softcap": 2.0, "sliding_window": 17, "head_dim": 40, "v_dim": 20},
    ]
    for more in kinds:
        yield PagedCase(seq_lens=[70, 3], query_lens=[6, 1], dtype=dtype, **more).run(ops)
    q, k, v = torch.split(normal((9, 12, 20), dtype, seed=1), 4, dim=1)
    yield ops.attention.paged_attention(q, KvCache(k, v), segments([6, 3], "cpu"), scale=0.3)


def _kv(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    angles = normal((30, 10), F32, seed=1)
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], dim=1), torch.tensor([3, 29, 0, 7, 11])
    for kept in {dtype, BF16, torch.int8}:
        q, k, v = (normal((ROWS, heads, 36), dtype, seed=heads) for heads in (4, 2, 3))
        cache = [normal((9, 2, 36), BF16 if kept == torch.int8 else kept, seed=3) for _ in range(2)]
        scales: list[Any] = [None, None]
        if kept == torch.int8:
            cache, scales = map(list, zip(*(to_int8(part) for part in cache), strict=True))
        ops.attention.rope_and_store_kv(q, k, v[:, :2], positions, cos_sin, KvCache(*cache, *scales), positions % 8 + 1)
        ops.attention.apply_rope(q, k, positions, cos_sin)
        axes = torch.arange(10, dtype=torch.int32) % 3
        ops.attention.apply_rope(q, k, torch.stack([positions, positions.flip(0), positions % 4]), cos_sin, axes=axes)
        yield from (q, k, *cache, *(scale for scale in scales if scale is not None))


def _recurrences(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    lens, slots = [3, 1, 17], [5, 2, 1]
    for case in RECURRENCES.values():
        inputs = joined([case.inputs(length, dtype, seed=100 * i) for i, length in enumerate(lens)])
        for state_dtype in {dtype} if isinstance(case, Conv) else {dtype, F32}:
            state = state_table(case, 8, state_dtype, seed=7)
            yield case.call(ops, inputs, state, state_batch(lens, slots, [[(2, 6)]]))
            yield state
    gates = DeltaGates(normal((3,), F32, seed=4), normal((3,), F32, seed=5))
    yield from ops.recurrence.delta_gates(normal((ROWS, 3), dtype, seed=1), normal((ROWS, 3), dtype, seed=2), gates)
    norm = GatedNorm(normal((48,), dtype, seed=3), 1e-5, 24, norm_first=True, sigmoid=False)
    yield ops.norms.gated_rms_norm(normal((ROWS, 48), dtype, seed=1), normal((ROWS, 48), dtype, seed=2), norm)


def _rows(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    x, y, weight = normal((ROWS, 97), dtype, seed=1), normal((ROWS, 97), dtype, seed=2), normal((97,), dtype, seed=3)
    yield ops.norms.rms_norm(x, weight, 1e-5)
    yield ops.norms.layer_norm(x, weight, y[0], 1e-6)
    yield ops.norms.match_rms(x, y, 1e-5)
    heads = x[:, :96].view(ROWS, 4, 24)
    yield ops.norms.layer_norm(heads, weight[:96].view(4, 24), None, 1e-6)
    yield from (ops.norms.add_rms_norm(x, y, weight, 1e-5), y)
    yield from (
        ops.sampling.finite_rows(x),
        ops.linear.embedding(torch.tensor([4, 0]), x),
        ops.elementwise.concat([x, y[:, :5]]),
    )
    yield from ops.sampling.argmax_rows(x.float().round())


def _selection(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Of keys in the inputs' type and in codes."""
    for int8 in (False, True):
        case = PagedCase(
            seq_lens=[9, 150],
            query_lens=[9, 2],
            q_heads=5,
            kv_heads=1,
            head_dim=20,
            dtype=dtype,
            int8=int8,
            seed=4,
        )
        q, weights = normal((11, 5, 20), dtype, seed=1), normal((11, 5), F32, seed=2)
        keys = KvCache(case.k_cache, case.k_cache, case.k_scale, case.k_scale)
        yield from ops.selection.select_tokens(q, weights, keys, case.paged, 7)
    blocks = torch.tensor([[0, 1, -1]] * 9 + [[3, 20, 36]] * 2, dtype=torch.int32)
    counts = torch.tensor([0] * 3 + [1] * 4 + [2] * 2 + [3] * 2, dtype=torch.int32)
    positions = torch.cat([torch.arange(9), torch.arange(148, 150)])
    yield from ops.selection.block_tokens(blocks, counts, positions, case.paged, 4)


def _tiers(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Steps of random widths over hot buffers, in the inputs' type and in codes."""
    for int8 in (False, True):
        case = TierCase(ops, 6, int8=int8)
        random_steps(case, 5, 8, top_k=4, most_tokens=3)
        yield from (case.tiers.positions, case.tiers.last_used, case.newest, case.counts)


def _compression(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    """Overlapping blocks and others, entries and a window, some of the entries selected."""
    step = Step("prompts")
    for rate, overlap in ((4, True), (8, False)):
        how, width = hows(rate, overlap), 20 * (1 + overlap)
        kv, gate = normal((step.num_tokens, 2 * width), dtype, seed=1).chunk(2, dim=1)
        ring, blocks = (
            step.ring(how, width, dtype),
            ops.compression.plan_blocks(step.positions, step.loc, step.paged(how), how),
        )
        yield from (ops.compression.compress(kv, gate, normal((rate, width), F32, seed=2), ring, blocks), *ring)
        kept = torch.arange(ring.kv[..., :3].numel(), dtype=F32).view(ring.kv[..., :3].shape)
        yield from (ops.compression.first_positions(step.positions.expand(3, -1), kept, blocks), kept)
    q, sinks = normal((step.num_tokens, 11, 20), dtype, seed=3), normal((11,), F32, seed=4)
    tokens, entries = step.cache(PAGE, 20, dtype, 7), step.cache(PAGE // 4, 20, dtype, 8)
    seen = ops.compression.entry_pages(step.positions, step.full, 4)
    given = step.positions, (tokens, step.window), (entries, seen)
    yield ops.compression.compressed_attention(q, *given, scale=0.3, window=6, sinks=sinks)
    angles = torch.linspace(0.1, 3.0, 96 * 6).view(96, 6)
    turned = q.clone()
    ops.compression.unrotate(turned, step.positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    yield turned


def _streams(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    x, out = normal((ROWS, 4 * 33), dtype, seed=4), normal((ROWS, 33), dtype, seed=5)
    weights = ops.streams.mix_weights(x, mixing(4, 33, last=False))
    yield from (*weights, ops.streams.last_weights(x, mixing(4, 33, last=True)))
    yield ops.streams.match_streams(x, normal((ROWS, 4 * 33), dtype, seed=6), 4)
    yield from (ops.streams.collapse_streams(x, weights.before), ops.streams.spread_streams(out, weights.behind))
    ops.streams.mix_streams_(x, weights.between)
    yield x


def _elementwise(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    x = normal((ROWS, 2 * 37), dtype, seed=1, scale=3)
    gate, up = x[:, :37], x[:, 37:]
    yield from (
        ops.elementwise.silu_and_mul(x),
        ops.elementwise.gelu_and_mul(x),
        ops.elementwise.gelu_and_mul(x, exact=True),
        ops.elementwise.sparse_gelu_and_mul(x, deviations=1.25),
        ops.elementwise.relu2(x),
        ops.elementwise.gelu(x),
        ops.elementwise.xielu(x, alpha_p=0.8, alpha_n=1.3, beta=0.5, eps=-1e-6),
    )
    yield ops.elementwise.clamped_swiglu(x, alpha=1.702, limit=2.5)
    yield from (
        ops.elementwise.mul(up, gate),
        ops.elementwise.mul_silu(up, gate),
        ops.elementwise.mul_sigmoid(up, gate),
    )
    yield from (
        ops.elementwise.add_(up.clone(), gate),
        ops.elementwise.scale_(x.clone(), 0.37),
        ops.elementwise.softcap_(x.float(), 3.0),
        ops.elementwise.narrow(x.float(), torch.bfloat16),
    )
    yield ops.elementwise.scale_rows_(x.clone()[:, 1:], torch.linspace(0.1, 3.0, 9), torch.arange(ROWS) % 9)
    scale = PixelScale(torch.linspace(0.01, 0.02, 3), torch.linspace(-1.0, -0.5, 3))
    yield ops.pictures.add_rows_(x.clone(), x.flip(0), torch.arange(ROWS, dtype=torch.int32) % 3)
    yield ops.pictures.patch_rows((torch.arange(20 * 37 * 3) % 256).byte().view(20, 37, 3), 17, scale, dtype)
    yield ops.pictures.mean_rows(x[: ROWS // 3 * 3], 3)
    yield ops.elementwise.scale_(torch.tensor([[1e-39, -1e-39, 3e38, 1.00390625, 1.01171875] * 3]).to(dtype), 1.5)


def _sampling(ops: Ops, dtype: torch.dtype) -> Iterator[Tensor]:
    rows = 12
    columns = torch.tensor([0.3, 1.0, 4.0] * 4), torch.tensor([0, 1, 30, 90] * 3), torch.tensor([0.2, 0.95, 1.0] * 4)
    uniform = torch.linspace(0.01, 0.99, rows, dtype=torch.float64)
    yield ops.sampling.sample_rows(
        normal((rows, 997), F32, seed=1, scale=2), Draws(uniform, *columns, torch.full((rows,), 0.01))
    )


CASES: Final[dict[str, Call]] = {
    "dense": _dense,
    "widened": _widened,
    "heads": _heads,
    "adapters": _adapters,
    "codes": _codes,
    "quantizing": _quantizing,
    "experts": _experts,
    "gating": _gating,
    "attention": _attention,
    "kv": _kv,
    "recurrences": _recurrences,
    "rows": _rows,
    "selection": _selection,
    "tiers": _tiers,
    "compression": _compression,
    "streams": _streams,
    "elementwise": _elementwise,
    "sampling": _sampling,
}
