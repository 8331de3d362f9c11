"""What runs in the interpreter is also what a GPU's compiler takes: types, shapes, shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_every_kernel_compiles_for_a_gpu_that_need_not_be_there(arch: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton_compile", str(arch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kernel_not_compiled" not in done.stderr, done.stderr[-2000:]
    compiled = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert {
        "_attend",
        "_attend_entries",
        "_combine",
        "_gather_parts",
        "_load_tokens",
        "_place",
        "_weights_of_streams",
        "_product",
        "_shrink",
        "_expand",
        "scan_mamba2",
        "scan_delta",
        "_sample_rows",
    } <= compiled
