"""Kernels for aarch64, compiled by a cross compiler and run by an emulator: no test runs on ARM hardware."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.base.cpu import this_cpu
from forebay.base.toolchain import HERE
from forebay.base.variants import ARM_VARIANTS, X86_VARIANTS, Variant
from forebay.ops.compiler import SOURCES, library, too_new_for_wheels
from forebay.ops.native.kernels import SIGNATURES
from tests.deadlines import HANGS_S
from tests.emulation.cases import CASES, UNTOUCHED
from tests.emulation.driver import MACHINE, EmulatedOps, compiled, emulated, emulated_variant, why_not
from tests.kernels import native_ops
from tests.ops.helpers import TOLERANCE

BEST, AVX2 = ARM_VARIANTS[0], X86_VARIANTS[-1]
# BFMMLA rounds sums of products otherwise than the multiply-adds of AVX2.
ANOTHER_ROUNDING = {("dense", torch.bfloat16), ("heads", torch.bfloat16)}

pytestmark = [
    pytest.mark.skipif(HERE == MACHINE, reason="tests/ops runs on this processor itself"),
    pytest.mark.skipif(bool(why_not()), reason=f"no cross compiler or emulator: {why_not()}"),
]


def differences(ours: EmulatedOps, dtype: torch.dtype) -> Iterator[str]:
    """Where results are not those of AVX2."""
    theirs = native_ops(AVX2, 2)
    for name, case in CASES.items():
        for i, (result, expected) in enumerate(zip(case(ours, dtype), case(theirs, dtype), strict=True)):
            assert result.dtype == expected.dtype, name
            near = torch.allclose(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            if not (near if (name, dtype) in ANOTHER_ROUNDING else torch.equal(result, expected)):
                yield f"{name}, result {i}: {(result != expected).sum()} of {result.numel()}"


@pytest.mark.skipif(AVX2 not in this_cpu().variants, reason="this CPU has no AVX2 to compare with")
def test_kernels_of_the_best_arm_variant_give_the_bits_of_avx2() -> None:
    """One test, since each process compiles the library if it is not there."""
    kernels = library(emulated_variant(BEST))
    assert too_new_for_wheels(kernels) == []
    ops = EmulatedOps(kernels, BEST.name, 2)
    assert {dtype: list(differences(ops, dtype)) for dtype in (torch.float32, torch.bfloat16)} == {
        torch.float32: [],
        torch.bfloat16: [],
    }
    assert {pattern.removeprefix("fb_") for pattern in SIGNATURES} - UNTOUCHED == {
        pattern.removeprefix("fb_") for pattern in ops.kernels.called
    } - UNTOUCHED


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", ARM_VARIANTS[1:], ids=lambda variant: variant.name)
def test_integer_products_are_exact(variant: Variant) -> None:
    """Of variants whose kernels differ from those of the best one by these products alone."""
    source = Path(__file__).with_name("dots.cpp")
    flags = variant.flags_for((SOURCES / "ints_neon.h").read_text())
    program = compiled(source, ("-O1", "-static", f"-I{SOURCES}", *flags))
    try:
        done = subprocess.run(emulated(program), capture_output=True, text=True, timeout=HANGS_S, check=False)
    finally:
        program.unlink()
    assert (done.returncode, done.stdout) == (0, "1008 sums\n"), done.stdout + done.stderr
