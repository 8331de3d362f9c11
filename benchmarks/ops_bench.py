"""Time every op, native against torch, on the shapes of SmolLM2-135M in bfloat16.

    python benchmarks/ops_bench.py [--threads 2] [--repeats 20] [--only linear|recurrent|others]

Times are medians over all layers of one step, so that weights, KV and states come from memory as they do when serving.
Recurrent layers are timed against what bounds them: decoding against a copy of as many bytes as their states, a prompt
against the layer's own matrix products. Quantized linear layers (4 bits, the head 8) are timed beside bfloat16 ones. On
a shared machine trust the ratio more than the milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.formats.quantize import quantize_rows
from forebay.formats.quantized import StoredCodes, stored_codes
from forebay.ops import LinearWeight, Ops
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.recurrence import Scan, StateBatch

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 576, 1536, 30, 49152
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
LINEARS = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
ROWS = (1, 4, 16, 64, 512)
LOGIT_ROWS = 64  # most rows that a step makes logits for
DTYPE = torch.bfloat16

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    size: str
    make: Callable[[Ops], Step]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE)


def linear_cases() -> Iterator[Case]:
    weights = [[random(n, k) * k**-0.5 for n, k in LINEARS] for _ in range(LAYERS)]
    head = random(VOCAB, HIDDEN) * HIDDEN**-0.5
    packed: dict[str, list[list[object]]] = {}

    def layers(ops: Ops, rows: int) -> Step:
        if ops.name not in packed:
            packed[ops.name] = [[ops.linear.pack(w) for w in layer] for layer in weights]
        inputs = {width: random(rows, width) for width in (HIDDEN, INTERMEDIATE)}

        def step() -> None:
            for layer in packed[ops.name]:
                for w in layer:
                    ops.linear.apply(inputs[w.in_features], w)

        return step

    def logits(ops: Ops, rows: int) -> Step:
        x, w = random(rows, HIDDEN), ops.linear.pack(head)
        return lambda: ops.linear.apply_f32(x, w)

    for rows in ROWS:
        yield Case(name=f"linears, {LAYERS} layers", size=f"M={rows}", make=lambda ops, m=rows: layers(ops, m))
    for rows in ROWS:
        if rows <= LOGIT_ROWS:
            yield Case(name="linear_f32 (LM head)", size=f"M={rows}", make=lambda ops, m=rows: logits(ops, m))


def _coded(weight: Tensor, bits: int) -> StoredCodes:
    codes = quantize_rows(weight.float().numpy(), bits)
    return stored_codes(codes.format, codes.shape, lambda: codes.rows)


def quantized_rows(ops: Ops, repeats: int) -> None:
    """Every linear layer of a step and the head for the rows it makes logits of: in codes, and in bfloat16."""
    weights = [random(n, k) * k**-0.5 for n, k in LINEARS]
    codes = [_coded(w, 4) for w in weights]
    head = random(VOCAB, HIDDEN) * HIDDEN**-0.5
    head_codes = _coded(head, 8)
    sides = [
        ([ops.linear.pack_quantized(w) for _ in range(LAYERS) for w in codes], ops.linear.pack_quantized(head_codes)),
        ([ops.linear.pack(w) for _ in range(LAYERS) for w in weights], ops.linear.pack(head)),
    ]
    num_bytes = sum(w.num_bytes for w in codes) * LAYERS + head_codes.num_bytes
    per_row = sum(w.numel() for w in weights) * LAYERS

    def step(layers: list[LinearWeight], head: LinearWeight, rows: int, logit_rows: int) -> Step:
        inputs = {width: random(rows, width) for width in (HIDDEN, INTERMEDIATE)}

        def run() -> None:
            for w in layers:
                ops.linear.apply(inputs[w.in_features], w)
            ops.linear.apply_f32(inputs[HIDDEN][:logit_rows], head)

        return run

    print(f"{'op':34}{'size':>10}{'codes':>14}{'bfloat16':>14}{'ratio':>8}")
    for rows in (1, 4, 16, 64, 128, 512):
        logit_rows = rows if rows <= LOGIT_ROWS else 1
        ours, theirs = median_seconds([step(*side, rows, logit_rows) for side in sides], repeats)
        products = 2 * (per_row * rows + head.numel() * logit_rows)
        note = f"{num_bytes / ours / 1e9:.1f} GB/s, {products / ours / 1e12:.2f} TFLOP/s"
        print_row(f"linears, {LAYERS} layers and head", f"M={rows}", ours, theirs, note)


def attention_cases() -> Iterator[Case]:
    def attention(ops: Ops, sequences: int, length: int, queries: int, shared: int = 0) -> Step:
        pages = -(-length // PAGE_SIZE)
        slots = (sequences * pages + 1) * PAGE_SIZE
        caches = [KvCache(*(random(slots, KV_HEADS, HEAD_DIM) for _ in range(2))) for _ in range(LAYERS)]
        table = torch.zeros(sequences + 1, pages, dtype=torch.int32)
        table[1:] = (torch.randperm(sequences * pages) + 1).view(sequences, pages)
        table[2:, : shared // PAGE_SIZE] = table[1, : shared // PAGE_SIZE]
        q = random(sequences * queries, Q_HEADS, HEAD_DIM)
        rows = torch.arange(1, sequences + 1, dtype=torch.int32)
        q_start = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32)
        seq_lens = torch.full((sequences,), length, dtype=torch.int32)

        def step() -> None:
            paged = PagedKv(
                page_table=table,
                rows=rows,
                q_start=q_start,
                seq_lens=seq_lens,
                page_size=PAGE_SIZE,
                out_cache_loc=torch.empty(0, dtype=torch.int64),
            )
            for cache in caches:
                ops.attention.paged_attention(q, cache, paged, scale=HEAD_DIM**-0.5)

        return step

    for sequences, length, queries in ((1, 200, 1), (16, 200, 1), (64, 200, 1), (1, 512, 512), (8, 128, 128)):
        kind = "decode" if queries == 1 else "prefill"
        yield Case(
            name=f"paged_attention {kind}, {LAYERS} layers",
            size=f"{sequences} x {length}",
            make=lambda ops, s=sequences, n=length, m=queries: attention(ops, s, n, m),
        )
    yield Case(
        name=f"paged_attention shared, {LAYERS} layers",
        size="64 x 1100",  # of which all have the first 1,008 tokens in common
        make=lambda ops: attention(ops, 64, 1100, 1, 1008),
    )


def small_cases() -> Iterator[Case]:
    weight, table = random(HIDDEN), random(VOCAB, HIDDEN)
    cos_sin = torch.randn(2048, HEAD_DIM)
    cache = KvCache(random(2048, KV_HEADS, HEAD_DIM), random(2048, KV_HEADS, HEAD_DIM))
    for rows in (1, 64, 512):
        x, residual, gate_up = random(rows, HIDDEN), random(rows, HIDDEN), random(rows, 2 * INTERMEDIATE)
        qkv = random(rows, QKV)
        q = qkv[:, : Q_HEADS * HEAD_DIM].view(rows, Q_HEADS, HEAD_DIM)
        k = qkv[:, Q_HEADS * HEAD_DIM : -KV_HEADS * HEAD_DIM].view(rows, KV_HEADS, HEAD_DIM)
        at = torch.arange(rows)
        logits = torch.randn(min(rows, LOGIT_ROWS), VOCAB)
        calls: dict[str, Callable[..., object]] = {
            "rms_norm": lambda ops, x=x: ops.norms.rms_norm(x, weight, 1e-5),
            "add_rms_norm": lambda ops, x=x, r=residual: ops.norms.add_rms_norm(x, r, weight, 1e-5),
            "silu_and_mul": lambda ops, x=gate_up: ops.elementwise.silu_and_mul(x),
            "apply_rope": lambda ops, q=q, k=k, at=at: ops.attention.apply_rope(q, k, at, cos_sin),
            "store_kv": lambda ops, k=k, at=at: ops.attention.store_kv(k, k, cache, at),
            "embedding": lambda ops, at=at: ops.linear.embedding(at, table),
            "argmax_rows": lambda ops, x=logits: ops.sampling.argmax_rows(x),
        }
        for name, call in calls.items():
            size = f"M={logits.shape[0] if name == 'argmax_rows' else rows}"
            yield Case(name=name, size=size, make=lambda ops, call=call: lambda: call(ops))


def expert_cases() -> Iterator[Case]:
    experts, choices, width = 16, 4, 256
    gate_up, down = [random(2 * width, HIDDEN) for _ in range(experts)], [random(HIDDEN, width) for _ in range(experts)]

    def step(ops: Ops, rows: int) -> Step:
        packed = ops.experts.pack_experts([ops.linear.pack(w) for w in gate_up], [ops.linear.pack(w) for w in down])
        x = random(rows, HIDDEN)
        weights, ids = torch.rand(rows, experts).topk(choices, dim=-1)
        return lambda: ops.experts.fused_experts(x, packed, ids, weights)

    for rows in (1, 16, 64):
        yield Case(name="fused_experts, 4 of 16", size=f"M={rows}", make=lambda ops, m=rows: step(ops, m))


RECURRENT_LAYERS, SEQUENCES, PROMPT = 12, 16, 512
Recurrence = Callable[[Ops, int], Callable[[Tensor, StateBatch], object]]  # by the number of tokens


@dataclass(frozen=True, kw_only=True)
class RecurrentCase:
    """`linears`: the layer's matrix products, outputs by inputs."""

    name: str
    state: tuple[int, ...]
    linears: tuple[tuple[int, int], ...]
    make: Recurrence


def mamba2_case() -> RecurrentCase:
    heads, head_size, state_size, hidden = 24, 64, 128, 768
    inner = heads * head_size

    def make(ops: Ops, tokens: int) -> Callable[[Tensor, StateBatch], object]:
        row = random(tokens, inner + 2 * state_size + heads)
        x, b, c, dt = row.split([inner, state_size, state_size, heads], dim=-1)
        x = x.unflatten(1, (heads, head_size))
        a, d, dt_bias = -torch.rand(heads), torch.rand(heads), torch.rand(heads)
        scan = Scan(a, d, dt_bias)
        return lambda state, batch: ops.recurrence.mamba2_scan(
            x, dt, b.unsqueeze(1), c.unsqueeze(1), scan, state, batch
        )

    linears = ((2 * inner + 2 * state_size + heads, hidden), (hidden, inner))
    return RecurrentCase(name="mamba2", state=(heads, state_size, head_size), linears=linears, make=make)


def delta_case(name: str, *, per_channel: bool) -> RecurrentCase:
    key_heads, heads, size, hidden = 8, 16, 128, 1024

    def make(ops: Ops, tokens: int) -> Callable[[Tensor, StateBatch], object]:
        row = random(tokens, (2 * key_heads + heads) * size)
        q, k, v = row.unflatten(1, (-1, size)).split([key_heads, key_heads, heads], dim=1)
        log_decay = -torch.rand(tokens, heads, *([size] if per_channel else []))
        beta = torch.rand(tokens, heads)
        return lambda state, batch: ops.recurrence.gated_delta_rule(q, k, v, log_decay, beta, state, batch)

    linears = ((2 * (key_heads + heads) * size + 2 * heads, hidden), (hidden, heads * size))
    return RecurrentCase(name=name, state=(heads, size, size), linears=linears, make=make)


def state_batch(sequences: int, length: int) -> StateBatch:
    none, slots = torch.zeros(0, dtype=torch.int32), torch.arange(1, sequences + 1, dtype=torch.int32)
    q_start = torch.arange(0, sequences * length + 1, length, dtype=torch.int32)
    return StateBatch(
        slots=slots,
        write_slots=slots,
        q_start=q_start,
        q_stop=q_start[1:],
        snap_start=torch.zeros(sequences + 1, dtype=torch.int32),
        snap_ends=none,
        snap_slots=none,
        positions=torch.arange(length).repeat(sequences),
    )


def bench_recurrent(ops: Ops, case: RecurrentCase, repeats: int) -> None:
    states = [torch.rand(SEQUENCES + 1, *case.state) for _ in range(RECURRENT_LAYERS)]
    copies = [torch.empty_like(state) for state in states]
    decode, prefill = case.make(ops, SEQUENCES), case.make(ops, PROMPT)
    many, one = state_batch(SEQUENCES, 1), state_batch(1, PROMPT)
    weights = [[ops.linear.pack(random(n, k)) for n, k in case.linears] for _ in range(RECURRENT_LAYERS)]
    inputs = [random(PROMPT, k) for _, k in case.linears]

    def products() -> None:
        for layer in weights:
            for x, w in zip(inputs, layer, strict=True):
                ops.linear.apply(x, w)

    steps: list[Step] = [
        lambda: [decode(state, many) for state in states],
        lambda: [copy[1:].copy_(state[1:]) for copy, state in zip(copies, states, strict=True)],
        lambda: [prefill(state, one) for state in states],
        products,
    ]
    decoding, copying, prompt, linears = median_seconds(steps, repeats)
    num_bytes = 2 * SEQUENCES * states[0][0].nbytes * RECURRENT_LAYERS
    rates = f"{num_bytes / decoding / 1e9:.1f} GB/s of state, a copy {num_bytes / copying / 1e9:.1f}"
    name = f"{case.name}, {RECURRENT_LAYERS} layers"
    print_row(f"{name}, decode", str(SEQUENCES), decoding, copying, rates)
    print_row(f"{name}, prompt", f"1 x {PROMPT}", prompt, linears, "")


def print_row(name: str, size: str, ours: float, bound: float, note: str) -> None:
    print(f"{name:34}{size:>10}{human(ours):>14}{human(bound):>14}{bound / ours:8.1f}   {note}".rstrip(), flush=True)


def recurrent_rows(ops: Ops, repeats: int) -> None:
    print(f"{'op':34}{'size':>10}{ops.name:>14}{'bound':>14}{'ratio':>8}")
    for case in (
        mamba2_case(),
        delta_case("gated delta", per_channel=False),
        delta_case("kimi delta", per_channel=True),
    ):
        bench_recurrent(ops, case, repeats)


def median_seconds(steps: list[Step], repeats: int) -> list[float]:
    medians = []
    for step in steps:
        # OpenMP's threads spin for some milliseconds after their last work, on the cores that the other backend needs.
        time.sleep(0.05)
        step()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times))
    return medians


def human(seconds: float) -> str:
    return f"{seconds * 1e6:9.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:9.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time every op, native against torch.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=["linear", "recurrent", "attention", "others"])
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    native, reference = make_ops("native", args.threads), make_ops("torch", args.threads)
    if args.only in (None, "linear"):
        quantized_rows(native, args.repeats)
    if args.only in (None, "recurrent"):
        recurrent_rows(native, args.repeats)
    if args.only in ("linear", "recurrent"):
        return
    print(f"{'op':34}{'size':>10}{native.name:>14}{'torch':>14}{'ratio':>8}")
    others = (linear_cases, attention_cases, small_cases, expert_cases)
    for cases in (attention_cases,) if args.only == "attention" else others:
        for case in cases():
            ours, theirs = median_seconds([case.make(native), case.make(reference)], args.repeats)
            print_row(case.name, case.size, ours, theirs, "")


if __name__ == "__main__":
    main()
