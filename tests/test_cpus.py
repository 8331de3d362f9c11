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

# What chooses types, kernels and memory, and one engine of each kind: plain, speculative, put to sleep. One process
# runs all of them for a CPU, since its start takes seconds, as that of an engine's process does.
FILES = tuple(f"tests/engine/test_{name}.py" for name in ("llm", "sizing", "build", "draft_models"))
OF_PROCESSES = "in_its_own_process or costs_only_that_steps_requests or tells_its_client"
# What does not depend on the processor, and drafts of a second and a third type.
OF_NO_PROCESSOR = (
    "of_transformers or back_to_the_system or is_closed or falcon_h1-qwen3 or gemma4_text-deepseek_v3 or is_refused"
    " or a_stop_string or one_after_the_other or as_in_other_engines or prints_one_line or that_nobody_knows"
    " or cannot_fit or continued"
)
# Of the best variant that this machine runs, the suite itself tells.
CPUS = [
    pytest.param(name, marks=marks)
    for name, marks in (("avx2", ()), ("avx512vnni", (pytest.mark.slow,)))
    if name in {variant.name for variant in this_cpu().variants[1:]}
]


@pytest.mark.skipif(bool(this_cpu().simulated), reason="the whole suite runs on a simulated CPU")
@pytest.mark.parametrize("cpu", CPUS)
def test_engine_tests_on_simulated_cpu_pass(cpu: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, "-k", f"not ({OF_PROCESSES} or {OF_NO_PROCESSOR})", *FILES],
        cwd=ROOT,
        env={**os.environ, CPU_VARIABLE: cpu},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
