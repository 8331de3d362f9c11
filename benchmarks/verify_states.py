"""Time what recurrent layers do in a step that verifies W tokens, beside a plain decode step.

    python benchmarks/verify_states.py [--threads 2] [--repeats 15] [--only falcon_h1]

The tokens are computed without writing a state, and the accepted ones again, with writes. Convolutions and scans of all
layers, by their Python; tokens accepted: one, half, all. Each repeat runs all in turn; printed are minima in ms,
and their ratio to the plain step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ops_bench import random
from forebay.backends import make_ops
from forebay.ops import Ops
from forebay.ops.reference.recurrence import Convolution, Scan, StateBatch

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
        return lambda n, state, batch: ops.recurrence.mamba2_scan(x[:n], dt[:n], b[:n], c[:n], weights, state, batch)

    return make


def delta(heads: int) -> Callable[[Ops, Tensor], Callable[[int, Tensor, StateBatch], object]]:
    def make(ops: Ops, row: Tensor) -> Callable[[int, Tensor, StateBatch], object]:
        q, k, v = row.unflatten(1, (-1, 128)).split([heads, heads, heads], dim=1)
        decay, beta = -torch.rand(len(row), heads), torch.rand(len(row), heads)
        return lambda n, state, batch: ops.recurrence.gated_delta_rule(
            q[:n], k[:n], v[:n], decay[:n], beta[:n], state, batch
        )

    return make


MODELS = (
    Model(name="falcon_h1 0.5B", layers=36, channels=1792, state=(24, 128, 64), scan=mamba2(24)),
    Model(name="qwen3_5 0.8B", layers=18, channels=6144, state=(16, 128, 128), scan=delta(16)),
    Model(name="mamba2 780M", layers=48, channels=3328, state=(48, 128, 64), scan=mamba2(48)),
)


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def batch_of(slots: Tensor, lens: int, accepted: int, write_slots: Tensor) -> StateBatch:
    q_start = torch.arange(len(slots) + 1, dtype=torch.int32) * lens
    none = int32([])
    return StateBatch(
        slots=slots,
        write_slots=write_slots,
        q_start=q_start,
        q_stop=q_start[:-1] + accepted,
        snap_start=torch.zeros_like(q_start),
        snap_ends=none,
        snap_slots=none,
        positions=torch.arange(lens).repeat(len(slots)),
    )


def bench(ops: Ops, model: Model, dtype: torch.dtype, rows: int, width: int, repeats: int) -> None:
    tokens, slots = rows * width, torch.arange(1, rows + 1, dtype=torch.int32)
    convs = [torch.rand(1 + rows, TAPS - 1, model.channels).to(torch.bfloat16) for _ in range(model.layers)]
    scans = [torch.rand(1 + rows, *model.state).to(dtype) for _ in range(model.layers)]
    x = random(tokens, model.channels)
    conv, scan = Convolution(random(TAPS, model.channels), None, silu=True), model.scan(ops, x)

    def layers(batch: StateBatch, n: int) -> None:
        for conv_state, scan_state in zip(convs, scans, strict=True):
            ops.recurrence.causal_conv(x[:n], conv, conv_state, batch)
            scan(n, scan_state, batch)

    verified = batch_of(slots, width, width, torch.zeros_like(slots))

    def verify(accepted: int) -> None:
        layers(verified, tokens)
        layers(batch_of(slots, width, accepted, slots), tokens)

    counts = sorted({1, (width + 1) // 2, width})
    steps: dict[str, Callable[[], None]] = {"plain": lambda: layers(batch_of(slots, 1, 1, slots), rows)}
    for count in counts:
        steps[str(count)] = lambda count=count: verify(count)
    times = measured(steps, repeats)
    ratios = "  ".join(
        f"{count}: {times[str(count)] * 1e3:6.2f} = {times[str(count)] / times['plain']:.2f}" for count in counts
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
    parser = argparse.ArgumentParser(description="Time the states of a step that verifies.")
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
