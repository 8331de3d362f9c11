"""The instruction sets that the native kernels are compiled for, and which of them a CPU runs."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One instruction set: the CPU flags that it needs (as /proc/cpuinfo spells them) and how it is compiled."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2: Final = Variant(name="avx2", needs=frozenset({"avx2", "fma", "f16c"}), flags=("-mavx2", "-mfma", "-mf16c"))


def _more(base: Variant, name: str, needs: set[str], *flags: str) -> Variant:
    return Variant(name=name, needs=base.needs | needs, flags=(*base.flags, *flags))


_AVX512: Final = _more(
    *(_AVX2, "avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
)
_AVX512_VNNI: Final = _more(_AVX512, "avx512vnni", {"avx512_vnni"}, "-mavx512vnni", "-DFOREBAY_VNNI")
_AVX512_BF16: Final = _more(_AVX512_VNNI, "avx512bf16", {"avx512_bf16"}, "-mavx512bf16", "-DFOREBAY_BF16")
VARIANTS: Final = (  # best first
    _more(_AVX512_BF16, "amx", {"amx_tile", "amx_bf16"}, "-DFOREBAY_AMX"),
    _AVX512_BF16,
    _AVX512_VNNI,
    _AVX512,
    _more(_AVX2, "avx2vnni", {"avx_vnni"}, "-mavxvnni", "-DFOREBAY_VNNI"),
    _AVX2,
)


@lru_cache
def cpu_flags(proc: Path = PROC) -> frozenset[str]:
    """The CPU's instruction sets by the kernel's names; empty where it does not tell."""
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def usable_variants() -> tuple[Variant, ...]:
    """The variants this CPU can run, best first; none off Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    return tuple(variant for variant in VARIANTS if variant.needs <= cpu_flags())
