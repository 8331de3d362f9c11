"""`python -m tests.ops.triton_compile 90`: compile the GPU's kernels to machine code for a compute capability, in the
shapes that models have. Needs no GPU: Triton brings the assembler. Prints one line per kernel.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from forebay.ops.reference.accept import Known
from forebay.ops.reference.adapters import PANEL, AdapterTable, panels_of
from forebay.ops.reference.attention import KvCache, PagedKv, segments
from forebay.ops.reference.compression import Compression, TokenRing
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.recurrence import Convolution, Scan
from forebay.ops.reference.sampling import Draws
from forebay.ops.reference.steps import Pages
from forebay.ops.reference.streams import Mixing
from forebay.ops.reference.tiers import TieredKv, TierLayout, TierStep
from forebay.ops.triton import TritonOps
from forebay.ops.triton.exchange import MemoryTransport, shared_bytes
from forebay.pools.cache_spec import RecentInputs
from tests.formats.coded import FORMATS, random_codes, stored
from tests.ops.chunks import rows_of_slots
from tests.ops.recurrences import state_batch

# Bytes of shared memory that one program may have: CUDA C++ Programming Guide, technical specifications.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class CompilesOnly:
    """A driver of a GPU that is not there: kernels are compiled, checked against its limits, and not launched."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self._arch]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        print(f"{name}: {len(binary)} bytes, {shared} of shared memory", flush=True)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args, **kwargs: None


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def float32(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.float32)


def attention(
    ops: TritonOps,
    tokens: int,
    heads: tuple[int, int],
    d: int,
    dv: int = 0,
    page_map: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Of two sequences; `dv`: latent attention."""
    k = zeros(64, heads[1], d)
    v = k[..., :dv] if dv else zeros(64, heads[1], d)
    q = zeros(tokens, heads[0], d)
    ops.attention.paged_attention(q, KvCache(k, v), paged(page_map), scale=0.1, **options)


def paged(page_map: torch.Tensor | None = None) -> PagedKv:
    rows, loc = int32(2), zeros(0, dtype=torch.int64)
    return PagedKv(
        page_table=int32(4, 8),
        rows=rows,
        q_start=int32(3),
        seq_lens=rows,
        page_size=16,
        out_cache_loc=loc,
        page_map=page_map,
    )


def main(arch: int) -> None:
    driver.set_active(CompilesOnly(arch))
    ops = TritonOps("cpu", 1)
    for tokens in (2, 9):
        attention(ops, tokens, (32, 8), 128)
        attention(ops, tokens, (64, 8), 64, sliding_window=128, sinks=float32(64), page_map=int32(9))
        attention(ops, tokens, (16, 1), 576, 512)
    attention(ops, 9, (16, 4), 256)
    attention(ops, 9, (8, 4), 256, sliding_window=1024, ahead=int32(9))
    heads = zeros(9, 12, 64)
    ops.attention.paged_attention(heads, KvCache(heads, heads.clone()), segments([9], "cpu"), scale=0.1)
    x, weight = zeros(3, 4096), zeros(4096)
    q, scale = zeros(9, 32, 128), float32(64, 8)
    for dtype in (torch.int8, torch.uint8):
        codes = zeros(64, 8, 128, dtype=dtype)
        cache = KvCache(codes, codes.clone(), scale, scale)
        for tokens in (2, 9):
            ops.attention.paged_attention(q[:tokens], cache, paged(), scale=0.1)
        ops.attention.store_kv(zeros(3, 8, 128), zeros(3, 8, 128), cache, torch.arange(3))
        latent = zeros(64, 1, 576, dtype=dtype)
        cache = KvCache(latent, latent[..., :512], scale[:, :1], scale[:, :1])
        ops.attention.paged_attention(zeros(9, 16, 576), cache, paged(), scale=0.1)
    ops.attention.apply_rope(zeros(3, 32, 128), zeros(3, 8, 128), torch.zeros(3, dtype=torch.int64), float32(9, 128))
    ops.attention.apply_rope(
        zeros(3, 32, 128),
        zeros(3, 8, 128),
        torch.zeros(3, 3, dtype=torch.int64),
        float32(9, 128),
        axes=int32(64),
    )
    keys = zeros(128, 1, 128)
    one_each = replace(paged(), q_start=torch.arange(3, dtype=torch.int32))
    ops.selection.select_tokens(zeros(2, 64, 128), float32(2, 64), KvCache(keys, keys), one_each, 64)
    cache = KvCache(zeros(64, 32, 128), zeros(64, 32, 128))
    ops.attention.store_kv(x.view(3, 32, 128), x.view(3, 32, 128), cache, torch.arange(3))
    ops.norms.rms_norm(x, weight, 1e-5)
    ops.norms.rms_norm(x.view(3, 32, 128), weight[:128], 1e-5)
    ops.norms.add_rms_norm(x, x.clone(), weight, 1e-5)
    for norm_first in (False, True):
        ops.norms.gated_rms_norm(x, x, GatedNorm(weight, 1e-5, 512, norm_first, sigmoid=norm_first))
    for name in ("silu_and_mul", "gelu_and_mul", "relu2"):
        getattr(ops.elementwise, name)(x)
    ops.elementwise.gelu_and_mul(x, exact=True)
    ops.elementwise.gelu(x, exact=True)
    ops.elementwise.xielu(x, alpha_p=0.8, alpha_n=1.3, beta=0.5, eps=-1e-6)
    ops.elementwise.clamped_swiglu(x, alpha=1.7, limit=7.0)
    ops.elementwise.mul_sigmoid(x, x[:, :32])
    ops.elementwise.scale_rows_(x, float32(9), torch.zeros(3, dtype=torch.int64))
    ops.elementwise.mul_silu(x, x)
    recurrences(ops, x, weight)
    many_linears(ops)
    adapters(ops)
    tiers(ops)
    compressed(ops)
    streams(ops)
    exchange()
    steps(ops)
    ops.pictures.replace_rows_(x, x.clone(), int32(3))
    ops.pictures.add_rows_(x, x.clone(), int32(3))
    ones = torch.ones(3)
    ops.sampling.argmax_rows(float32(3, 128_256))
    ops.sampling.mask_logits(float32(3, 128_256), torch.arange(2), int32(2, 4008))
    ops.sampling.sample_rows(float32(3, 128_256), Draws(ones.double(), ones, ones.long(), ones, ones))


def tiers(ops: TritonOps) -> None:
    """Latent KV and KV in codes, of rows that decode with drafts."""
    layout = TierLayout(num_columns=4096, page_size=64, hot_base=6400, host_base=65536)
    batch = replace(paged(), page_size=64)
    longs = torch.zeros(3, dtype=torch.int64)
    step = TierStep(
        layout=layout,
        page_map=int32(9),
        active=int32(4),
        newest=int32(4, 64),
        device_loc=longs,
        host_loc=longs,
        counts=torch.zeros(2, dtype=torch.int64),
    )
    codes, scale = zeros(64, 1, 576, dtype=torch.int8), float32(64, 1)
    for k, scales in ((zeros(64, 1, 576), (None, None)), (codes, (scale, scale))):
        kept = TieredKv(KvCache(k, k[..., :512], *scales), int32(4, 4096), int32(4, 4096))
        ops.tiers.swap_in(int32(3, 2048), int32(3), batch, kept, step)


def compressed(ops: TritonOps) -> None:
    """Blocks of 4 tokens with those before, and of 128; selected entries, KV in codes too."""
    batch = replace(paged(int32(9)), q_start=torch.tensor([0, 4, 9], dtype=torch.int32))
    for rate, overlap in ((4, True), (128, False)):
        how = Compression(rate=rate, overlap=overlap, ring=2 * rate, by_row=True)
        width = 512 * (1 + overlap)
        positions, loc = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        blocks = ops.compression.plan_blocks(positions, loc, batch, how)
        ring, states = TokenRing(*zeros(2, 4, how.ring, width)), zeros(9, 2 * width)
        ops.compression.compress(states[:, :width], states[:, width:], float32(rate, width), ring, blocks)
    q = zeros(9, 64, 512)
    ops.compression.unrotate(q, positions, float32(9, 64))
    scale, seen = (
        float32(64, 1),
        replace(paged(), page_table=int32(9, 64), rows=int32(9), seq_lens=int32(9), page_size=1),
    )
    for dtype in (torch.bfloat16, torch.int8, torch.uint8):
        keys, factors = zeros(64, 1, 512, dtype=dtype), None if dtype == torch.bfloat16 else scale
        cache = KvCache(keys, keys, factors, factors)
        ops.compression.compressed_attention(
            q, positions, (cache, batch), (cache, seen), scale=0.1, window=128, sinks=float32(64)
        )


def exchange() -> None:
    """Of two ranks."""
    MemoryTransport(torch.zeros(shared_bytes(2), dtype=torch.uint8), 0, 2).gathered(zeros(300, 4096))


def streams(ops: TritonOps) -> None:
    wide = zeros(9, 4 * 4096)
    for count, scales in ((24, 3), (4, 1)):
        mixing = Mixing(
            num_streams=4,
            fn=float32(count, 4 * 4096),
            scale=float32(scales),
            base=float32(count),
            norm_eps=1e-6,
            eps=1e-6,
            iterations=20,
        )
        (ops.streams.mix_weights if scales == 3 else ops.streams.last_weights)(wide, mixing)
    ops.streams.spread_streams(ops.streams.collapse_streams(wide, float32(9, 4)), float32(9, 4))
    ops.streams.mix_streams_(wide, float32(9, 4, 4))


def adapters(ops: TritonOps) -> None:
    panels = panels_of([0] * 256 + [1] * 128)
    for rank in (16, 64):
        a, b = zeros(5, 2, rank, 256), zeros(5, len(panels), rank, PANEL)
        table = AdapterTable(a, b, int32(5, 2), torch.tensor(panels, dtype=torch.int32))
        ops.adapters.add(zeros(9, 384), zeros(9, 256), int32(9), table)


def steps(ops: TritonOps) -> None:
    rows, starts, longs = int32(2), int32(3), torch.zeros(9, dtype=torch.int64)
    ops.steps.place_tokens(rows, starts, longs, Pages(int32(9, 512), 16), 9)
    for given in (None, torch.zeros(9, 3, dtype=torch.int64)):
        ops.steps.rope_positions(longs, given, rows, starts, longs)
    ops.steps.map_locations(longs, int32(9), 16)
    ops.steps.due(int32(9), int32(9), longs, longs)
    ops.steps.advance(longs, rows, starts)
    known = Known(longs, longs, torch.zeros(9, 3, dtype=torch.int64))
    ops.steps.decode_ids(rows, starts, known, 9, 128_256)
    ops.steps.accept(longs, torch.ones(9, dtype=torch.bool), longs, rows, starts, known)


def recurrences(ops: TritonOps, x: torch.Tensor, weight: torch.Tensor) -> None:
    batch = state_batch([1, 2], [1, 2])
    ops.recurrence.causal_conv(x, Convolution(zeros(4, 4096), weight, silu=True), zeros(4, 3, 4096), batch)
    b, eight = zeros(3, 1, 256), float32(8)
    scan = Scan(eight, eight, eight, (0.0, 1.0))
    states = rows_of_slots(4, (8, 256, 128), RecentInputs(model=(8 * 128, 256, 8)))
    ops.recurrence.mamba2_scan(zeros(3, 8, 128), zeros(3, 8), b, b, scan, states, batch)
    wide, rates = float32(4096), float32(4096, 16)
    ops.recurrence.mamba1_scan(x, x, x[:, :16], x[:, 16:32], Scan(rates, wide, wide), float32(4, 4096, 16), batch)
    key, value = zeros(3, 4, 128), zeros(3, 8, 128)
    for decays in (float32(3, 8), float32(3, 8, 128)):
        recent = RecentInputs(float32=(decays[0].numel(), 8), model=(4 * 128, 8 * 128))
        ops.recurrence.gated_delta_rule(
            key, key, value, decays, float32(3, 8), rows_of_slots(4, (8, 128, 128), recent), batch
        )


def many_linears(ops: TritonOps) -> None:
    inner = [ops.linear.pack(zeros(256, 128), zeros(256)) for _ in range(4)]
    experts = ops.experts.pack_experts(inner, [ops.linear.pack(zeros(128, 128)) for _ in range(4)])
    codes = [stored(random_codes(form, 256, 256, seed=0)) for form in FORMATS.values()]
    ops.experts.sparse_mixer(float32(3, 16), 0.01)
    for tokens in (3, 300):
        ids = torch.zeros(tokens, 2, dtype=torch.int64)
        ops.experts.fused_experts(zeros(tokens, 128), experts, ids, float32(tokens, 2))
        for weight in codes:
            ops.linear.apply(zeros(tokens, 256), ops.linear.pack_quantized(weight, float32(256)))
            ops.linear.apply_f32(zeros(tokens, 256), ops.linear.pack_quantized(weight))


if __name__ == "__main__":
    main(int(sys.argv[1]))
