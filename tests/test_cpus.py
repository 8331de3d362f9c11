"""Engine tests on lesser CPUs: those that decide by the processor, under a simulated AVX2-only and an AVX-512 VNNI CPU.

`FOREBAY_CPU=avx2 make test` runs the whole suite so.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forebay.base.cpu import CPU_VARIABLE, this_cpu
from forebay.base.package import ROOT
from tests.deadlines import HANGS_S

# What chooses types, kernels and memory, and one engine of each kind: plain, speculative, put to sleep. A process runs
# two of them: its start takes seconds.
SELECTION = {
    "plain": ("tests/engine/test_llm.py", "tests/engine/test_sizing.py"),
    "speculative": ("tests/engine/test_build.py", "tests/engine/test_draft_models.py"),
}
# Of the best variant that this machine runs, the suite itself tells.
CPUS = [name for name in ("avx2", "avx512vnni") if name in {variant.name for variant in this_cpu().variants[1:]}]


@pytest.mark.skipif(bool(this_cpu().simulated), reason="the whole suite runs on a simulated CPU")
@pytest.mark.parametrize("files", SELECTION.values(), ids=SELECTION.keys())
@pytest.mark.parametrize("cpu", CPUS)
def test_engine_tests_on_simulated_cpu_pass(cpu: str, files: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env={**os.environ, CPU_VARIABLE: cpu},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
