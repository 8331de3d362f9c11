"""Microseconds of a GPU's kernels beside their floors, and beside cuBLASLt and SDPA: products, attention, scans.

    python -m benchmarks.gpu_kernels                       # two minutes, the most important rows first
    python -m benchmarks.gpu_kernels --tiny --device cpu   # that this program works: in Triton's interpreter

A floor is a call's bytes over the bandwidth of a copy, or its operations over the rate of a large product. Both are
measured just before. A call is timed in a CUDA graph over copies of its weights, so that caches hold none of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_decode import bandwidth
from forebay.base.scan_rows import CHUNK
from forebay.config.engine_config import CacheTypes
from forebay.formats.gguf_types import GGML_TYPES
from forebay.formats.quantized import MXFP4, CodeFormat, GroupQuantized, stored_codes
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.recurrence import Scan, StateBatch
from forebay.ops.triton import TritonOps
from forebay.ops.triton.choices import ALL_ROWS
from forebay.ops.triton.linear import TritonLinearWeight
from forebay.pools.cache_spec import RecentInputs, RecurrentState

Call = Callable[[int], object]
"""A call on the i-th copy of its weights."""

REPEATS: Final = 5
ROTATED_BYTES: Final = 200 << 20  # of all copies: more than a GPU's caches hold
Q8_0 = GGML_TYPES[8].codes
assert Q8_0 is not None
OF_BYTES: Final = 0.60  # goals: of the bytes of codes, up to 64 rows
OF_PRODUCT: Final = 0.65  # of the rate of products in bfloat16, in prompts
OF_STATES: Final = 0.85  # of the bytes of the states that decodes move
PROMPT_ATTENTION: Final = 450e12  # operations per second in prompts, of 8,192 tokens on an H100
FORMS: Final[dict[str, CodeFormat | None]] = {
    "bfloat16": None,
    "int4 by 128": CodeFormat(bits=4, minimums=False, group=128),
    "MXFP4": MXFP4,
    "8 bits by 32": Q8_0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: our call and another's on `copies` copies, with the bytes and operations of one.

    The goal is `goal_us` on an H100, or the share `goal_share` of the floor.
    """

    name: str
    num_bytes: float
    operations: float
    ours: Call
    theirs: Call | None
    copies: int = 1
    goal_us: float | None = None
    goal_share: float | None = None

    def goal(self, floor_us: float) -> str:
        """Return the cell of the goal, in microseconds."""
        if self.goal_share is not None:
            return f"{floor_us / self.goal_share:,.1f}"
        return "" if self.goal_us is None else f"{self.goal_us:,.1f}"


class Sizes:
    """The shapes: those of Llama-3.1-8B, Falcon-H1-7B and Qwen3.5-9B, or tiny ones."""

    def __init__(self, *, tiny: bool) -> None:
        self.matrices = [(64, 256)] if tiny else [(14_336, 4096), (4096, 4096)]
        self.rows = (1, 17) if tiny else (1, 64, 2048)
        # Sequences, their tokens, and the goal of decodes in microseconds.
        self.contexts = [(2, 20, 1e6)] if tiny else [(64, 8192, 830.0), (256, 1024, 460.0), (16, 8192, 250.0)]
        self.prompts = (3,) if tiny else (8192, 2048)
        self.heads = (4, 2, 16) if tiny else (32, 8, 128)
        self.prompt = 3 if tiny else 2048
        self.states = (2, 16, 32) if tiny else (24, 128, 256)  # heads, head size, state size
        self.delta = (2, 1, 16) if tiny else (32, 16, 128)  # heads, key heads, their size
        self.square = 64 if tiny else 8192


def _codes(form: CodeFormat, outputs: int, inputs: int) -> GroupQuantized:
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 1 << form.bits, (outputs, inputs), dtype=np.uint8)
    scales = np.full((outputs, inputs // form.group), 120 if form is MXFP4 else 0.01)
    return GroupQuantized(format=form, codes=codes, scales=scales.astype(np.uint8 if form is MXFP4 else np.float16))


def _copied(weight: TritonLinearWeight, copies: int) -> list[TritonLinearWeight]:
    """Copies whose addresses are those of tensors of their own."""
    found = [weight]
    for _ in range(copies - 1):
        values, scales = weight.values.clone(), None if weight.scales is None else weight.scales.clone()
        addresses = weight.addresses.clone()
        addresses[:2] = torch.tensor([values.data_ptr(), 0 if scales is None else scales.data_ptr()])
        found.append(replace(weight, values=values, scales=scales, addresses=addresses))
    return found


def products(ops: TritonOps, sizes: Sizes, device: str) -> Iterator[Row]:
    for n, k in sizes.matrices:
        dense = torch.randn(n, k, device=device).bfloat16()
        for name, form in FORMS.items():
            if form is None:
                made = replace(ops.linear.pack(dense), own_rows=ALL_ROWS)
            else:
                codes = _codes(form, n, k)
                made = ops.linear.pack_quantized(stored_codes(form, (n, k), lambda codes=codes: codes.rows))
            assert isinstance(made, TritonLinearWeight)
            num_bytes = sum(part.nbytes for part in (made.values, made.scales) if part is not None)
            copies = max(1, min(12, ROTATED_BYTES // num_bytes)) if device == "cuda" else 1
            weights, others = _copied(made, copies), [dense.clone() for _ in range(copies)]
            for rows in sizes.rows:
                x = torch.randn(rows, k, device=device).bfloat16()
                yield Row(
                    name=f"product, {n} x {k}, {name}, {rows} rows",
                    num_bytes=num_bytes + x.nbytes + 2 * rows * n,
                    operations=2.0 * rows * n * k,
                    ours=lambda i, x=x, weights=weights: ops.linear.apply(x, weights[i]),
                    theirs=lambda i, x=x, others=others: F.linear(x, others[i]),
                    copies=copies,
                    goal_share=None if form is None else OF_BYTES if rows <= 64 else OF_PRODUCT,
                )


def attention(ops: TritonOps, sizes: Sizes, device: str) -> Iterator[Row]:
    heads, kv_heads, size = sizes.heads
    prompts = [(length, 1, length, None) for length in sizes.prompts]
    for queries, batch, context, goal_us in [*((1, *each) for each in sizes.contexts), *prompts]:
        pages = -(-context // 16)
        cache = KvCache(*(torch.randn(batch * pages * 16, kv_heads, size, device=device).bfloat16() for _ in range(2)))
        paged = PagedKv(
            page_table=torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages),
            rows=torch.arange(batch, dtype=torch.int32, device=device),
            q_start=torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            page_size=16,
            out_cache_loc=torch.zeros(batch * queries, dtype=torch.int64, device=device),
        )
        q = torch.randn(batch * queries, heads, size, device=device).bfloat16()
        own = [part.view(batch, -1, kv_heads, size)[:, :context].transpose(1, 2) for part in (cache.k, cache.v)]
        pairs = batch * (context * (context + 1) // 2 if queries > 1 else context)

        def theirs(
            _: int, q: Tensor = q, own: list[Tensor] = own, queries: int = queries, batch: int = batch
        ) -> Tensor:
            return F.scaled_dot_product_attention(
                q.view(batch, queries, heads, size).transpose(1, 2), *own, is_causal=queries > 1, enable_gqa=True
            )

        yield Row(
            name=f"attention, {batch} x {context}, {queries} queries each",
            num_bytes=2.0 * batch * context * kv_heads * size * 2 + 2 * q.nbytes,
            operations=4.0 * pairs * heads * size,
            ours=lambda _, q=q, cache=cache, paged=paged: ops.attention.paged_attention(
                q, cache, paged, scale=size**-0.5
            ),
            theirs=theirs,
            goal_us=goal_us if queries == 1 else 1e6 * 4.0 * pairs * heads * size / PROMPT_ATTENTION,
        )


def scans(ops: TritonOps, sizes: Sizes, device: str) -> Iterator[Row]:
    """Of decodes only the last of a chunk writes the state."""
    for batch, tokens in ((64 if sizes.square > 64 else 2, 1), (1, sizes.prompt)):
        total = batch * tokens
        heads, size, state_size = sizes.states
        state = _slots(batch, (heads, state_size, size), RecentInputs(model=(heads * size, state_size, heads)), device)
        states, moved = _state_batch(batch, tokens, device), 1 + 1 / CHUNK if tokens == 1 else 2.0
        x = torch.randn(total, heads, size, device=device).bfloat16()
        b = torch.randn(total, 1, state_size, device=device).bfloat16()
        dt, ones = torch.zeros(total, heads, device=device).bfloat16(), torch.ones(heads, device=device)
        scan = Scan(-ones, ones, ones)
        yield Row(
            name=f"Mamba 2, {batch} x {tokens} tokens, {heads} heads of {size} x {state_size}",
            num_bytes=moved * batch * 4.0 * heads * size * state_size + 2 * x.nbytes + 2 * b.nbytes,
            operations=6.0 * total * heads * size * state_size,
            ours=lambda _, a=(x, dt, b, b, scan, state, states): ops.recurrence.mamba2_scan(*a),
            theirs=None,
            goal_share=OF_STATES if tokens == 1 else None,
        )
        heads, key_heads, size = sizes.delta
        for decays in ((), (size,)):
            own_keys = heads if decays else key_heads
            recent = RecentInputs(
                float32=(heads * (size if decays else 1), heads), model=(own_keys * size, heads * size)
            )
            state = _slots(batch, (heads, size, size), recent, device)
            key = torch.randn(total, own_keys, size, device=device).bfloat16()
            value = torch.randn(total, heads, size, device=device).bfloat16()
            decay, beta = -torch.rand(total, heads, *decays, device=device), torch.rand(total, heads, device=device)
            yield Row(
                name=f"delta rule{' by channel' if decays else ''}, {batch} x {tokens} tokens, {heads} heads of {size}",
                num_bytes=moved * batch * 4.0 * heads * size * size + 2 * (key.nbytes + value.nbytes) + decay.nbytes,
                operations=8.0 * total * heads * size * size,
                ours=lambda _, a=(key, key, value, decay, beta, state, states): ops.recurrence.gated_delta_rule(*a),
                theirs=None,
                goal_share=OF_STATES if tokens == 1 else None,
            )


def _slots(batch: int, state: tuple[int, ...], recent: RecentInputs, device: str) -> Tensor:
    (column,) = RecurrentState(ssm=state, recent=recent).columns(CacheTypes(dtype="bfloat16", chunked_scans=True))
    return torch.zeros(batch + 1, *column.shape, device=device)


def _state_batch(batch: int, tokens: int, device: str) -> StateBatch:
    """Decodes are in the middle of a chunk."""
    ints = {"dtype": torch.int32, "device": device}
    slots, starts, none = torch.arange(1, batch + 1, **ints), torch.arange(batch + 1, **ints), torch.zeros(0, **ints)
    positions = torch.full((batch,), CHUNK // 2, device=device) if tokens == 1 else torch.arange(tokens, device=device)
    return StateBatch(
        slots=slots,
        write_slots=slots,
        q_start=starts * tokens,
        q_stop=starts[1:] * tokens,
        snap_start=torch.zeros(batch + 1, **ints),
        snap_ends=none,
        snap_slots=none,
        positions=positions,
    )


def time_us(call: Call, copies: int, device: str) -> float:
    """Return the median time of one call."""
    if device == "cpu":
        begin = time.perf_counter()
        call(0)
        return 1e6 * (time.perf_counter() - begin)
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times = []
    for _ in range(REPEATS + 1):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        times.append(1000 * begin_event.elapsed_time(end_event) / copies)
    return statistics.median(times[1:])


def rate(size: int, device: str) -> float:
    """Operations per second of a large product."""
    a = torch.randn(size, size, device=device).bfloat16()
    return 2e6 * size**3 / time_us(lambda _: a @ a, 1, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no row begins")
    args = parser.parse_args()
    begin, ops, sizes = time.perf_counter(), TritonOps(args.device, 1), Sizes(tiny=args.tiny)
    speed, operations = bandwidth(args.device), rate(sizes.square, args.device)
    print(f"copies at {speed / 1e9:,.0f} GB/s, a product of {sizes.square}³ at {operations / 1e12:,.0f} TFLOP/s\n")
    print("| kernel | floor, us | ours, us | of floor | goal, us | cuBLASLt or SDPA, us |")
    print("|---|---|---|---|---|---|")
    left_out = 0
    for made in (scans, products, attention):
        for row in made(ops, sizes, args.device):
            if time.perf_counter() - begin > args.limit:
                left_out += 1
                continue
            floor = 1e6 * max(row.num_bytes / speed, row.operations / operations)
            ours = time_us(row.ours, row.copies, args.device)
            theirs = "" if row.theirs is None else f"{time_us(row.theirs, row.copies, args.device):,.1f}"
            figures = f"{floor:,.1f} | {ours:,.1f} | {floor / ours:.0%} | {row.goal(floor)}"
            print(f"| {row.name} | {figures} | {theirs} |", flush=True)
    if left_out:
        print(f"\nleft out after {args.limit:.0f} s: {left_out} rows")


if __name__ == "__main__":
    main()
