"""The instruction sets that the native kernels are compiled for, and which of them a CPU runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from forebay.base.package import ROOT
from forebay.base.toolchain import HERE

PREBUILT: Final = ROOT / "forebay" / "ops" / "prebuilt"  # in a wheel: whoever installs that needs no compiler


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One instruction set: the CPU flags that it needs (as /proc/cpuinfo spells them), how it is compiled, and the cost
    of lacking its additions. `options` are macros with the compiler flags that each adds, for the files that name it:
    all others are compiled once for the variants with and without it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...] = ()
    cost: str = ""
    machine: str = HERE

    def more(self, name: str, needs: set[str], flags: tuple[str, ...], cost: str) -> Variant:
        """Return a variant that adds CPU features and compiler flags to this one."""
        return replace(self, name=name, needs=self.needs | needs, flags=(*self.flags, *flags), cost=cost)

    def option(self, name: str, needs: set[str], macro: str, flags: tuple[str, ...], cost: str) -> Variant:
        """Return a variant that adds CPU features, and a macro with flags for the files that name it, to this one."""
        return replace(self.more(name, needs, (), cost), options=(*self.options, (macro, flags)))

    def flags_for(self, text: str) -> tuple[str, ...]:
        """The compiler's flags for a source of this text, with that of its headers."""
        named = [(f"-D{macro}", *flags) for macro, flags in self.options if macro in text]
        return (*self.flags, *itertools.chain(*named))


_INTEGERS: Final = "quantized layers take 2 to 3 times as long for prompts, 1.5 times for 16 streams"
_AVX2: Final = Variant(
    name="avx2",
    needs=frozenset({"avx2", "fma", "f16c"}),
    flags=("-mavx2", "-mfma", "-mf16c"),
    cost="torch's kernels are used, several times slower",
    machine="x86_64",
)
_AVX512: Final = _AVX2.more(
    "avx512",
    {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    "prompts take 2 to 3 times as long, 16 streams 1.5 to 2 times",
)
_AVX512_VNNI: Final = _AVX512.option("avx512vnni", {"avx512_vnni"}, "FOREBAY_VNNI", ("-mavx512vnni",), _INTEGERS)
_AVX512_BF16: Final = _AVX512_VNNI.more(
    *("avx512bf16", {"avx512_bf16"}, ("-mavx512bf16", "-DFOREBAY_BF16")),
    "arithmetic is in float32",
)
X86_VARIANTS: Final = (  # best first
    _AVX512_BF16.more(
        "amx", {"amx_tile", "amx_bf16"}, ("-DFOREBAY_AMX",), "prompts and many streams do without matrix tiles"
    ),
    _AVX512_BF16,
    _AVX512_VNNI,
    _AVX512,
    _AVX2.option("avx2vnni", {"avx_vnni"}, "FOREBAY_VNNI", ("-mavxvnni",), _INTEGERS),
    _AVX2,
)
_NEON: Final = Variant(
    name="neon",
    needs=frozenset({"asimd"}),
    flags=("-march=armv8-a",),
    cost="torch's kernels are used",
    machine="aarch64",
)
# No cost of these was measured: there was no such machine.
_DOTPROD: Final = _NEON.option(
    *("dotprod", {"asimddp"}, "FOREBAY_DOTPROD", ("-march=armv8.2-a+dotprod",)),
    "integer products take four instructions in place of one",
)
_I8MM: Final = _DOTPROD.option(
    *("i8mm", {"i8mm"}, "FOREBAY_I8MM", ("-march=armv8.2-a+dotprod+i8mm",)),
    "integer products of several rows take twice the instructions",
)
ARM_VARIANTS: Final = (  # best first
    _I8MM.option(
        *("bf16", {"bf16"}, "FOREBAY_BFMMLA", ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
        "layers without codes are computed in float32",
    ),
    _I8MM,
    _DOTPROD,
    _NEON,
)
VARIANTS: Final = (*X86_VARIANTS, *ARM_VARIANTS)
AMX: Final = X86_VARIANTS[0].name  # its kernels open codes, and round no inputs


def variants_for(flags: frozenset[str]) -> tuple[Variant, ...]:
    """The variants that a CPU with `flags` runs, best first."""
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def family(flags: frozenset[str]) -> tuple[Variant, ...]:
    """All variants for CPUs of the kind that `flags` are of, best first."""
    return ARM_VARIANTS if _NEON.needs <= flags else X86_VARIANTS


def lacks(flags: frozenset[str]) -> str:
    """Name what a CPU with `flags` lacks for the better variants, with the cost of each; "" for the best variant."""
    return "; ".join(_lacks(flags))


def _lacks(flags: frozenset[str]) -> Iterator[str]:
    best = next(iter(variants_for(flags)), None)
    named: frozenset[str] = frozenset()
    every = family(flags)
    for variant in reversed(every if best is None else every[: every.index(best)]):
        missing = variant.needs - flags - named
        named |= missing
        yield f"without {', '.join(sorted(missing))}: {variant.cost}"
