"""The processor as one value, which every default that depends on it reads.

`FOREBAY_CPU` replaces the processor by a lesser one that it can simulate: `FOREBAY_CPU=avx2 forebay serve` chooses the
kernels, the types and the memory of a machine with AVX2 only. Each child process inherits the variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.variants import ARM_VARIANTS, VARIANTS, Variant, family, lacks, variants_for

PROC: Final = Path("/proc")
CPU_VARIABLE: Final = "FOREBAY_CPU"
NO_VARIANT: Final = "none"  # a CPU that runs none of the native kernels
BFLOAT16_FLAGS: Final = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# The largest instruction set that oneDNN may use, by variant.
ONEDNN_ISA: Final = {
    "amx": "AVX512_CORE_AMX",
    "avx512bf16": "AVX512_CORE_BF16",
    "avx512vnni": "AVX512_CORE_VNNI",
    "avx512": "AVX512_CORE",
    "avx2vnni": "AVX2_VNNI",
    "avx2": "AVX2",
    NO_VARIANT: "SSE41",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The instruction sets of a processor, by the kernel's names. `simulated` is the value of FOREBAY_CPU; empty for
    the processor itself."""

    flags: frozenset[str]
    simulated: str = ""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The kernel variants that it runs, best first; empty except on x86-64 with AVX2 and aarch64 under
        Linux."""
        return variants_for(self.flags)

    @property
    def bfloat16(self) -> tuple[str, ...]:
        """Flags of the instructions for bfloat16 products."""
        return tuple(sorted(self.flags & BFLOAT16_FLAGS))

    @property
    def lacks(self) -> str:
        """The instruction sets that better variants need, and the cost of each; empty for the best CPU."""
        return lacks(self.flags)

    @property
    def library_limits(self) -> dict[str, str]:
        """The environment that holds torch, oneDNN and MKL to a simulated processor."""
        if not self.simulated:
            return {}
        if family(self.flags) is ARM_VARIANTS:
            return {"ATEN_CPU_CAPABILITY": "default"}  # NEON; the other libraries have no such limit
        best = self.variants[0].name if self.variants else NO_VARIANT
        aten, mkl = ("default", "SSE4_2") if best == NO_VARIANT else ("avx2", "AVX2")
        if "avx512f" in self.flags:
            aten, mkl = "avx512", "AVX512"
        return {
            "ATEN_CPU_CAPABILITY": aten,
            "ONEDNN_MAX_CPU_ISA": ONEDNN_ISA[best],
            "MKL_ENABLE_INSTRUCTIONS": mkl,
        }


def this_cpu(environment: Mapping[str, str] = os.environ) -> Cpu:
    """The processor, or the one that FOREBAY_CPU simulates. Raises ConfigError if it cannot simulate that."""
    return _cpu(environment.get(CPU_VARIABLE, ""))


@cache
def _cpu(simulated: str) -> Cpu:
    here = read_flags(PROC)
    return simulate(simulated, here) if simulated else Cpu(flags=here)


def simulate(name: str, here: frozenset[str]) -> Cpu:
    """The processor `name`, a variant's name or `none`, on one with the flags `here`. Raises ConfigError if that
    lacks instructions."""
    variant = next((variant for variant in VARIANTS if variant.name == name), None)
    if variant is None and name != NO_VARIANT:
        known = ", ".join([*(variant.name for variant in variants_for(here)), NO_VARIANT])
        raise ConfigError(f"{CPU_VARIABLE}={name}: no such CPU is known: use {known}, or unset it")
    needs = variant.needs if variant else frozenset[str]()
    if missing := needs - here:
        raise ConfigError(
            f"{CPU_VARIABLE}={name}: this CPU lacks {', '.join(sorted(missing))}: use "
            f"{', '.join([*(variant.name for variant in variants_for(here)), NO_VARIANT])}, or unset it"
        )
    return Cpu(flags=needs, simulated=name)


def read_flags(proc: Path) -> frozenset[str]:
    """The CPU's instruction sets by the kernel's names; empty if the machine does not list them."""
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
