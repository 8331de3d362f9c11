"""The native kernels that the suite runs: every variant that the CPU has, and the best one for whole engines.

`FOREBAY_CPU=avx2 make test` is the suite as it is on a machine without AVX-512: see `forebay.base.cpu`.
`FOREBAY_EMULATED=dotprod pytest tests/ops` runs the tests of kernels on those for ARM, in an emulator.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from forebay.base.cpu import this_cpu
from forebay.base.variants import ARM_VARIANTS, Variant
from forebay.ops.compiler import library
from forebay.ops.native.ops import NativeOps
from tests.emulation.driver import EmulatedOps, emulated_variant

NATIVE: Final = "native"
EMULATED: Final = tuple(
    emulated_variant(variant) for variant in ARM_VARIANTS if variant.name == os.environ.get("FOREBAY_EMULATED")
)
VARIANTS: Final = EMULATED or this_cpu().variants
# Integer products are in linear layers alone, so that other kernels differ by nothing where the rest is the same.
WITH_INTEGERS: Final = ("test_linear", "test_linear_quantized", "test_experts")


def variants_in(module: str) -> list[Variant]:
    """Those that a module of tests runs on."""
    every = module.rpartition(".")[2] in WITH_INTEGERS
    return [variant for variant in VARIANTS if every or variant is VARIANTS[0] or not variant.name.endswith("vnni")]


def named(ops_name: str) -> Variant:
    """The variant of native ops, by their name."""
    return next(variant for variant in VARIANTS if ops_name == f"native-{variant.name}")


@cache
def native_ops(variant: Variant, num_threads: int, activation_bits: int = 16) -> NativeOps:
    make = EmulatedOps if variant in EMULATED else NativeOps
    return make(library(variant), variant.name, num_threads, activation_bits)
