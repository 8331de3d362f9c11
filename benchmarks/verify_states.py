"""Time what recurrent layers do in a step that verifies W tokens, two ways, beside a plain decode step.

    python benchmarks/verify_states.py [--threads 2] [--repeats 15] [--only falcon_h1]

(a) keeps the state behind each token in a scratch row and copies the one behind the last accepted token. (b) computes
the tokens without writing a state and runs the accepted ones again, with writes; that their inputs must be kept until
then is not in its times. Convolutions and scans of all layers, tokens accepted: one, half, all. Each repeat runs all of
them in turn; printed are minima, in ms, and the ratio of (a) to (b).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ops_bench import random
from forebay.ops import Ops, make_ops
from forebay.ops.recurrence import Convolution, Scan, StateBatch
from forebay.ops.states import StateColumns, Wishes

TAPS = 4
Run = Callable[[int, Tensor, Tensor, StateBatch], object]  # so many tokens, on the states of a layer


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    layers: int
    channels: int  # of the convolution
    state: tuple[int, ...]
    scan: Callable[[Ops, Tensor], Callable[[int, Tensor, StateBatch], object]]


def mamba2(heads: int) -> Callable[[Ops, Tensor], Callable[[int, Tensor, StateBatch], object]]:
    def make(ops: Ops, row: Tensor) -> Callable[[int, Tensor, StateBatch], object]:
        x, b, c = row.split([heads * 64, 128, 128], dim=-1)
        x, b, c, dt = x.unflatten(1, (heads, 64)), b.unsqueeze(1), c.unsqueeze(1), random(len(row), heads)
        weights = Scan(-torch.rand(heads), torch.rand(heads), torch.rand(heads))
        return lambda n, state, batch: ops.mamba2_scan(x[:n], dt[:n], b[:n], c[:n], weights, state, batch)

    return make


def delta(heads: int) -> Callable[[Ops, Tensor], Callable[[int, Tensor, StateBatch], object]]:
    def make(ops: Ops, row: Tensor) -> Callable[[int, Tensor, StateBatch], object]:
        q, k, v = row.unflatten(1, (-1, 128)).split([heads, heads, heads], dim=1)
        decay, beta = -torch.rand(len(row), heads), torch.rand(len(row), heads)
        return lambda n, state, batch: ops.gated_delta_rule(q[:n], k[:n], v[:n], decay[:n], beta[:n], state, batch)

    return make


MODELS = (
    Model(name="falcon_h1 0.5B", layers=36, channels=1792, state=(24, 128, 64), scan=mamba2(24)),
    Model(name="qwen3_5 0.8B", layers=18, channels=6144, state=(16, 128, 128), scan=delta(16)),
    Model(name="mamba2 780M", layers=48, channels=3328, state=(48, 128, 64), scan=mamba2(48)),
)


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def batch_of(slots: Tensor, lens: int, write_slots: Tensor, scratch: Tensor | None = None) -> StateBatch:
    q_start = torch.arange(len(slots) + 1, dtype=torch.int32) * lens
    none = int32([])
    return StateBatch(
        slots=slots,
        write_slots=write_slots,
        q_start=q_start,
        snap_start=torch.zeros_like(q_start) if scratch is None else q_start,
        snap_ends=none if scratch is None else q_start[-1:].new_tensor(range(1, int(q_start[-1]) + 1)),
        snap_slots=none if scratch is None else scratch,
    )


def bench(ops: Ops, model: Model, dtype: torch.dtype, rows: int, width: int, repeats: int) -> None:
    tokens, slots = rows * width, torch.arange(1, rows + 1, dtype=torch.int32)
    num_rows = 1 + rows + tokens
    convs = [torch.rand(num_rows, TAPS - 1, model.channels).to(torch.bfloat16) for _ in range(model.layers)]
    scans = [torch.rand(num_rows, *model.state).to(dtype) for _ in range(model.layers)]
    x = random(tokens, model.channels)
    conv, scan = Convolution(random(TAPS, model.channels), None, silu=True), model.scan(ops, x)
    columns = StateColumns((*convs, *scans))
    positions = torch.arange(tokens, dtype=torch.int64)
    wishes = Wishes(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32))

    def layers(batch: StateBatch, n: int) -> None:
        for conv_state, scan_state in zip(convs, scans, strict=True):
            ops.causal_conv(x[:n], conv, conv_state, batch)
            scan(n, scan_state, batch)

    nowhere = torch.zeros_like(slots)
    kept = batch_of(slots, width, nowhere, int32(range(1 + rows, num_rows)))
    unkept = batch_of(slots, width, nowhere)

    def with_scratch(accepted: int) -> None:
        layers(kept, tokens)
        ops.commit_states(columns, kept, positions, torch.full((rows,), accepted), wishes)

    def again(accepted: int) -> None:
        layers(unkept, tokens)
        layers(batch_of(slots, accepted, slots), rows * accepted)

    counts = sorted({1, (width + 1) // 2, width})
    steps: dict[str, Callable[[], None]] = {"plain": lambda: layers(batch_of(slots, 1, slots), rows)}
    for count in counts:
        steps[f"a{count}"] = lambda count=count: with_scratch(count)
        steps[f"b{count}"] = lambda count=count: again(count)
    times = measured(steps, repeats)
    ratios = "  ".join(
        f"{count}: {times[f'a{count}'] * 1e3:6.2f} / {times[f'b{count}'] * 1e3:6.2f} = "
        f"{times[f'a{count}'] / times[f'b{count}']:.2f}"
        for count in counts
    )
    kind = str(dtype).removeprefix("torch.")
    print(f"{model.name:15} {kind:9} {rows} x {width}  plain {times['plain'] * 1e3:6.2f} ms  {ratios}", flush=True)


def measured(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: min(values[1:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the states of a step that verifies, two ways.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", help="the beginning of a model's name")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ops = make_ops("native", args.threads)
    for model in MODELS:
        if model.name.startswith(args.only or ""):
            for dtype in (torch.float32, torch.bfloat16):
                for rows in args.rows:
                    for width in args.widths:
                        bench(ops, model, dtype, rows, width, args.repeats)


if __name__ == "__main__":
    main()
