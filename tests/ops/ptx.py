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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_LOADS = re.compile(
    r"ld\.global[\w.:]*?(?:\.(?P<vector>v[24]))?\.(?P<type>[bsuf]\d+)|cp\.async\.c[ag]\.[^;]*?, (?P<bytes>0x\w+)"
)


@dataclass(frozen=True, kw_only=True)
class Code:
    """One compiled kernel: `loads` are its loads from the GPU's memory by the bytes that a thread gets at once."""

    kernel: str
    loads: dict[int, int]
    matrix_units: dict[str, int]
    local_bytes: int  # of a thread, in memory instead of registers
    k_orders: list[str]  # in which matrix units take inputs


def compiled(arch: int, *names: str) -> dict[str, Code]:
    """The kernels of `CASES`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.ptx", str(arch), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
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


def _code(kernel: Any, cubin: Path) -> Code:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin.write_bytes(kernel.asm["cubin"])
    shown = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    ptx = kernel.asm["ptx"]
    units = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
    return Code(
        kernel=kernel.metadata.name,
        loads=dict(widths(ptx)),
        matrix_units={unit: ptx.count(unit) for unit in units if unit in ptx},
        local_bytes=sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", shown)),
        k_orders=sorted(set(re.findall(r"kWidth = \d+", kernel.asm["ttgir"]))),
    )


def _product(rows: int, form: str | None) -> Callable[[Any], None]:
    def call(ops: Any) -> None:
        import torch

        from forebay.formats.quantized import CodeFormat
        from forebay.ops.triton.linear import own_product
        from tests.formats.coded import FORMATS, random_codes, stored

        forms = FORMATS | {"int4 by 128": CodeFormat(bits=4, minimums=False, group=128)}
        if form is None:
            weight = ops.pack_linear(torch.zeros(256, 1024, dtype=torch.bfloat16))
        else:
            weight = ops.pack_quantized(stored(random_codes(forms[form], 256, 1024, seed=0)))
        own_product(torch.zeros(rows, 1024, dtype=torch.bfloat16), weight, torch.bfloat16)

    return call


CASES: dict[str, Callable[[Any], None]] = {
    f"{form or 'dense'}, {rows} rows": _product(rows, form)
    for form in (None, "int4 by 128", "Q4_0", "Q8_0", "MXFP4", "FP8 by 128", "Q4_K", "Q6_K", "NVFP4")
    for rows in (1, 64, 128, 300)
}


def main(arch: int, *names: str) -> None:
    import tempfile

    import triton
    from triton.runtime import driver

    from forebay.ops.triton import TritonOps
    from tests.ops.triton_compile import CompilesOnly

    compiled_last: list[Any] = []
    driver.set_active(CompilesOnly(arch))
    triton.knobs.runtime.jit_post_compile_hook = lambda **hook: compiled_last.append(hook["fn"].jit_function)
    ops = TritonOps("cpu", 1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            CASES[name](ops)
            kernel = list(compiled_last[-1].device_caches[0][0].values())[-1]
            found[name] = asdict(_code(kernel, Path(folder, "kernel.cubin")))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
