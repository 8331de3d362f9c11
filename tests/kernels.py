"""The native kernels that the suite runs: every variant that the CPU has, and the best one for whole engines.

`FOREBAY_CPU=avx2 make test` is the suite as it is on a machine without AVX-512: see `forebay.base.cpu`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from forebay.base.cpu import this_cpu
from forebay.base.variants import Variant
from forebay.ops.compiler import library
from forebay.ops.native import NativeOps

NATIVE: Final = "native"
VARIANTS: Final = this_cpu().variants
# Integer products are in linear layers alone, so that other kernels differ by nothing where the rest is the same.
WITH_INTEGERS: Final = ("test_linear", "test_linear_quantized", "test_experts")


def variants_in(module: str) -> list[Variant]:
    """Those that a module of tests runs on."""
    every = module.rpartition(".")[2] in WITH_INTEGERS
    return [variant for variant in VARIANTS if every or variant is VARIANTS[0] or not variant.name.endswith("vnni")]


@cache
def native_ops(variant: Variant, num_threads: int) -> NativeOps:
    return NativeOps(library(variant), variant.name, num_threads)
