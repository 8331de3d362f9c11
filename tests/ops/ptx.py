"""Kernels as a GPU's compiler makes them, without a GPU: which loads, which matrix units, what did not fit.

`compiled(90, "name", ...)` compiles in a process of its own, since here kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

_LOADS = re.compile(
    r"ld\.global[\w.:]*?(?:\.(?P<vector>v[24]))?\.(?P<type>[bsuf]\d+)|cp\.async\.c[ag]\.[^;]*?, (?P<bytes>0x\w+)"
)

_ORDERED = re.compile(r"\b(?:bar\.sync|(?:ld|st|atom)\.global(?:\.sys\.\w+)?)")
_INSTRUCTIONS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;\n]+);")
_BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_LOADING = re.compile(r"\b(?:LDG|LDGSTS|UTMALDG)\b")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True, kw_only=True)
class Code:
    """One compiled kernel: `loads` are its loads from the GPU's memory by the bytes that a thread gets at once."""

    kernel: str
    loads: dict[int, int]
    matrix_units: dict[str, int]
    local_bytes: int  # of a thread, in memory instead of registers
    local_in_loops: int  # loads and stores of these in innermost loops, whose steps are keys or inputs
    local_in_any_loop: int
    skipped_in_loops: int  # instructions that a branch of an innermost loop leaves out
    k_orders: list[str]  # in which matrix units take inputs
    fp8_units: int  # instructions of matrix units that multiply FP8
    variants: int  # of the kernel that were compiled until then
    memory_order: list[str]  # accesses to the GPU's memory and barriers, in the order of the text, repeated ones once


def compiled(arch: int, *names: str) -> dict[str, Code]:
    """The kernels of `CASES`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.ptx", str(arch), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        name: Code(**code | {"loads": {int(size): count for size, count in code["loads"].items()}})
        for name, code in found.items()
    }


def widths(ptx: str) -> Counter[int]:
    """How many loads from the GPU's memory there are, by the bytes of one thread."""
    found: Counter[int] = Counter()
    for load in _LOADS.finditer(ptx):
        if load["bytes"]:
            found[int(load["bytes"], 16)] += 1
        else:
            found[int((load["vector"] or "v1")[1:]) * int(load["type"][1:]) // 8] += 1
    return found


@dataclass(frozen=True)
class Sass:
    """A kernel's machine code. A loop is what lies between a branch back and where it leads, if it loads from the
    GPU's memory: others wait for a copy or a matrix unit. Some waits lie behind the end of the kernel and lead back
    into it, without being loops."""

    instructions: list[tuple[int, str]]  # with their addresses

    @classmethod
    def of(cls, text: str) -> Sass:
        body, end, _ = text.rpartition(" EXIT ;")
        return cls([(int(at, 16), one) for at, one in _INSTRUCTIONS.findall(body if end else text)])

    def branches(self) -> Iterator[tuple[int, int]]:
        """Yield the address of each branch, and where it leads."""
        for at, text in self.instructions:
            if found := _BRANCH.search(text):
                yield at, int(found[1], 16)

    def loops(self) -> list[tuple[int, int]]:
        """Return the first and the last address of each loop."""
        loads = [at for at, text in self.instructions if _LOADING.search(text)]
        back = [(to, at) for at, to in self.branches() if to < at]
        return [(begin, end) for begin, end in back if any(begin <= at <= end for at in loads)]

    def inner_loops(self) -> list[tuple[int, int]]:
        """Return the loops with no other loop in them."""
        loops = self.loops()
        return [one for one in loops if not any(one[0] <= b and e <= one[1] for b, e in loops if (b, e) != one)]

    def local_in(self, loops: list[tuple[int, int]]) -> int:
        """Return how many loads and stores of local memory are in these loops."""
        return sum(
            any(begin <= at <= end for begin, end in loops) for at, text in self.instructions if _LOCAL.search(text)
        )

    def skipped_in_loops(self) -> int:
        """Return the most instructions that one branch forward within an innermost loop leaves out."""
        inner = self.inner_loops()
        skips = [(at, to) for at, to in self.branches() if any(begin <= at < to <= end for begin, end in inner)]
        return max((sum(at < one < to for one, _ in self.instructions) for at, to in skips), default=0)


def _code(kernel: Any, variants: int, cubin: Path) -> Code:
    import triton

    def dumped(what: str) -> str:
        return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin.write_bytes(kernel.asm["cubin"])
    shown = dumped("--dump-resource-usage")
    local_bytes = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", shown))
    ptx, sass = kernel.asm["ptx"], Sass.of(dumped("-sass"))
    units = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
    return Code(
        kernel=kernel.metadata.name,
        loads=dict(widths(ptx)),
        matrix_units={unit: ptx.count(unit) for unit in units if unit in ptx},
        local_bytes=local_bytes,
        local_in_loops=sass.local_in(sass.inner_loops()),
        local_in_any_loop=sass.local_in(sass.loops()),
        skipped_in_loops=sass.skipped_in_loops(),
        variants=variants,
        fp8_units=len(re.findall(r"(?:mma|wgmma)[\w.:]*\.e4m3\.e4m3", ptx)) + ptx.count("kind::f8f6f4"),
        memory_order=[each for each, _ in groupby(found[0] for found in _ORDERED.finditer(ptx))],
        k_orders=sorted(set(re.findall(r"kWidth = \d+", kernel.asm["ttgir"]))),
    )


@dataclass(frozen=True)
class Case:
    """A call of ops that compiles the kernel of that name, among others."""

    kernel: str
    call: Callable[[Any], None]


def _product(rows: int, form: str | None, *, fp8_inputs: bool = False) -> Case:
    def call(ops: Any) -> None:
        import torch

        from forebay.formats.quantized import CodeFormat
        from forebay.ops.triton.linear import own_product
        from tests.formats.coded import FORMATS, random_codes, stored

        forms = FORMATS | {"int4 by 128": CodeFormat(bits=4, minimums=False, group=128)}
        if form is None:
            weight = ops.linear.pack(torch.zeros(256, 1024, dtype=torch.bfloat16))
        else:
            weight = ops.linear.pack_quantized(stored(random_codes(forms[form], 256, 1024, seed=0)))
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        own_product(x, weight, torch.bfloat16, fp8_inputs=fp8_inputs)

    return Case("_product", call)


def _experts(tokens: int) -> Case:
    def call(ops: Any) -> None:
        import torch

        inner, outer = (
            [ops.linear.pack(torch.zeros(rows, width, dtype=torch.bfloat16)) for _ in range(4)]
            for rows, width in ((512, 256), (256, 256))
        )
        ids, x = torch.zeros(tokens, 2, dtype=torch.int64), torch.zeros(tokens, 256, dtype=torch.bfloat16)
        ops.experts.fused_experts(x, ops.experts.pack_experts(inner, outer), ids, torch.zeros(tokens, 2))

    return Case("_product", call)


def _every_tile() -> Case:
    """What a first call compiles ahead on a GPU, of experts, and then such calls of several numbers of rows."""

    def call(ops: Any) -> None:
        import torch

        from forebay.ops.triton import products

        weights = [ops.linear.pack(torch.zeros(256, 256, dtype=torch.bfloat16)) for _ in range(2)]
        experts = ops.experts.pack_experts(weights, [ops.linear.pack(torch.zeros(256, 128, dtype=torch.bfloat16))] * 2)
        x = torch.zeros(900, 256, dtype=torch.bfloat16)
        starts = torch.zeros(3, dtype=torch.int32)
        runs = products.Runs(starts, starts, 2, 64, x_rows=starts, x_shares=2)
        products.compile_tiles(x, x, experts.gate_up_at, weights[0], runs)
        for rows in (4, 40, 900):
            block_rows = products.tile_of(rows, x.dtype, None, products.chip_of(x.device)).rows
            runs = products.Runs(starts, starts, 2, block_rows, x_rows=starts, x_shares=2)
            products.product(x, x, experts.gate_up_at, weights[0], rows, runs)

    return Case("_product", call)


def _bytewise() -> Case:
    """A kernel that opens codes of four bits as the one before `_product` did: byte by byte, with a scale for each."""
    import triton
    import triton.language as tl

    def bytewise(x, codes, scales, out, k, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
        col, row = tl.arange(0, 32), tl.arange(0, 16)
        acc = tl.zeros([16, 32], tl.float32)
        for start in range(0, k // 2, DEPTH):
            byte = start + tl.arange(0, DEPTH)
            packed = tl.load(codes + col[None, :] * (k // 2) + byte[:, None])
            scale = tl.load(scales + col[None, :] * (k // 32) + (byte // 16)[:, None]).to(tl.float32)
            tile = ((packed & 15).to(tl.float32) * scale).to(x.dtype.element_ty)
            acc += tl.dot(tl.load(x + row[:, None] * k + byte[None, :]), tile)
        tl.store(out + row[:, None] * 32 + col[None, :], acc)

    def call(ops: Any) -> None:
        import torch

        x, codes = torch.zeros(16, 1024, dtype=torch.bfloat16), torch.zeros(32, 512, dtype=torch.uint8)
        scales, out = torch.zeros(32, 32, dtype=torch.float16), torch.zeros(16, 32)
        triton.jit(bytewise)[(1,)](x, codes, scales, out, 1024, DEPTH=64)

    return Case("bytewise", call)


def _scan(kernel: str, state_size: int = 128, *, per_channel: bool = False) -> Case:
    """Of states in float32, inputs in bfloat16. A prompt and a decode are computed by the same code."""

    def call(ops: Any) -> None:
        import torch

        from forebay.ops.reference.recurrence import Scan
        from forebay.pools.cache_spec import RecentInputs
        from tests.ops.chunks import rows_of_slots
        from tests.ops.recurrences import state_batch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16)

        batch = state_batch([1, 1], [1, 2])
        eight, value = torch.zeros(8), zeros(2, 8, 128)
        if kernel == "_mamba1":
            rates, wide, x = torch.zeros(4096, 16), torch.zeros(4096), zeros(2, 4096)
            scan = Scan(rates, wide, wide)
            ops.recurrence.mamba1_scan(x, x, x[:, :16], x[:, 16:32], scan, torch.zeros(4, 4096, 16), batch)
        elif kernel.endswith("mamba2"):
            b = zeros(2, 1, state_size)
            recent = RecentInputs(model=(8 * 128, state_size, 8))
            table = rows_of_slots(4, (8, state_size, 128), recent)
            ops.recurrence.mamba2_scan(value, zeros(2, 8), b, b, Scan(eight, eight, eight), table, batch)
        else:
            key, decays = zeros(2, 4, 128), torch.zeros(2, 8, *[128][:per_channel])
            recent = RecentInputs(float32=(decays[0].numel(), 8), model=(4 * 128, 8 * 128))
            ops.recurrence.gated_delta_rule(
                key, key, value, decays, torch.zeros(2, 8), rows_of_slots(4, (8, 128, 128), recent), batch
            )

    return Case(kernel, call)


def _attention(codes: str, tokens: int) -> Case:
    """Of two sequences, on KV in bfloat16 or in codes of eight bits."""

    def call(ops: Any) -> None:
        import torch

        from forebay.ops.reference.attention import KvCache
        from tests.ops.triton_compile import float32, paged, zeros

        k = zeros(64, 8, 128, dtype=getattr(torch, codes))
        scale = None if codes == "bfloat16" else float32(64, 8)
        ops.attention.paged_attention(zeros(tokens, 32, 128), KvCache(k, k.clone(), scale, scale), paged(), scale=0.1)

    return Case("_attend", call)


def _compressed(ops: Any) -> None:
    from tests.ops.triton_compile import compressed

    compressed(ops)


def _streams(ops: Any) -> None:
    from tests.ops.triton_compile import streams

    streams(ops)


def _tiers(ops: Any) -> None:
    from tests.ops.triton_compile import tiers

    tiers(ops)


def _exchange(ops: Any) -> None:
    from tests.ops.triton_compile import exchange

    exchange()


def _segments(ops: Any) -> None:
    """Attention of an encoder."""
    import torch

    from forebay.ops.reference.attention import KvCache, segments
    from tests.ops.triton_compile import zeros

    q, k, v = torch.split(zeros(300, 3 * 12, 64), 12, dim=1)
    ops.attention.paged_attention(q, KvCache(k, v), segments([200, 100], "cpu"), scale=0.1)


SCANS = {
    "Mamba 2": _scan("scan_mamba2"),
    "Mamba 2, wide states": _scan("scan_mamba2", 256),
    "Mamba 2, chunks": _scan("prepare_mamba2"),
    "Mamba 2, open chunks": _scan("keep_recent"),
    "Mamba 1": _scan("_mamba1"),
    "delta rule": _scan("scan_delta"),
    "delta rule, chunks": _scan("prepare_delta"),
    "delta rule by channel": _scan("scan_delta", per_channel=True),
    "delta rule by channel, chunks": _scan("prepare_delta", per_channel=True),
}
CASES: dict[str, Case] = {
    f"{form or 'dense'}, {rows} rows": _product(rows, form)
    for form in (None, "int4 by 128", "Q4_0", "Q8_0", "MXFP4", "FP8 by 128", "Q4_K", "Q6_K", "NVFP4")
    for rows in (1, 64, 128, 300)
} | {f"experts, {tokens} tokens": _experts(tokens) for tokens in (1, 900)}
CASES |= {f"FP8 by FP8, {rows} rows": _product(rows, "FP8 by 128", fp8_inputs=True) for rows in (1, 64, 128, 300)}
KV_TYPES = ("bfloat16", "int8", "uint8")
CASES |= {f"KV in {codes}, {tokens} tokens": _attention(codes, tokens) for codes in KV_TYPES for tokens in (2, 9)}
CASES |= SCANS
CASES |= {kernel: Case(kernel, _compressed) for kernel in ("_compress", "_attend_entries")}
CASES |= {kernel: Case(kernel, _streams) for kernel in ("_stream_sums", "_weights_of_streams", "_mix")}
CASES |= {kernel: Case(kernel, _tiers) for kernel in ("_place", "_load_tokens")}
CASES["exchange"] = Case("_gather_parts", _exchange)
CASES["segments"] = Case("_attend", _segments)
CASES["bytewise"] = _bytewise()
CASES["every tile"] = _every_tile()


def main(arch: int, *names: str) -> None:
    import tempfile

    import triton
    from triton.runtime import driver

    from forebay.ops.triton import TritonOps
    from tests.ops.triton_compile import CompilesOnly

    functions: dict[str, Any] = {}

    def remember(**hook: Any) -> None:
        functions[hook["fn"].name.rpartition(".")[2]] = hook["fn"].jit_function

    driver.set_active(CompilesOnly(arch))
    triton.knobs.runtime.jit_post_compile_hook = remember
    ops = TritonOps("cpu", 1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            CASES[name].call(ops)
            kernels = list(functions[CASES[name].kernel].device_caches[0][0].values())
            found[name] = asdict(_code(kernels[-1], len(kernels), Path(folder, "kernel.cubin")))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
