"""Which native kernels the suite is run with: the best that the CPU has, or those that FOREBAY_KERNELS names.

`FOREBAY_KERNELS=avx2 make test` is the suite as it is on a machine without AVX-512. Servers that tests start read the
variable themselves; what tests make in their own process is made with `NATIVE`. The kernels' own tests run on every
instruction set that the CPU has, not only the best: the others are other people's machines.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from forebay.base.variants import Variant, usable_variants
from forebay.ops.compiler import library
from forebay.ops.native import NativeOps

NATIVE = os.environ.get("FOREBAY_KERNELS", "native")
VARIANTS: Final = usable_variants()
# Integer products are in linear layers alone, so that other kernels differ by nothing where the rest is the same.
WITH_INTEGERS: Final = ("test_linear", "test_linear_quantized", "test_experts")


def variants_in(module: str) -> list[Variant]:
    """Those that a module of tests runs on."""
    every = module.rpartition(".")[2] in WITH_INTEGERS
    return [variant for variant in VARIANTS if every or variant is VARIANTS[0] or not variant.name.endswith("vnni")]


@cache
def native_ops(variant: Variant, num_threads: int) -> NativeOps:
    return NativeOps(library(variant), variant.name, num_threads)
