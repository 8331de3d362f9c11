"""The instruction sets that the native kernels are compiled for, and which of them a CPU runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forebay.base.package import ROOT

PREBUILT: Final = ROOT / "forebay" / "ops" / "prebuilt"  # in a wheel: whoever installs that needs no compiler


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One instruction set: the CPU flags that it needs (as /proc/cpuinfo spells them), how it is compiled, and what is
    lost without what it adds."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    cost: str = ""

    def more(self, name: str, needs: set[str], flags: tuple[str, ...], cost: str) -> Variant:
        """Return a variant that adds CPU features and compiler flags to this one."""
        return Variant(name=name, needs=self.needs | needs, flags=(*self.flags, *flags), cost=cost)


_INTEGERS: Final = "quantized layers take 2 to 3 times as long for prompts, 1.5 times for 16 streams"
_AVX2: Final = Variant(
    name="avx2",
    needs=frozenset({"avx2", "fma", "f16c"}),
    flags=("-mavx2", "-mfma", "-mf16c"),
    cost="torch's kernels are used, several times slower",
)
_AVX512: Final = _AVX2.more(
    "avx512",
    {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    "prompts take 2 to 3 times as long, 16 streams 1.5 to 2 times",
)
_AVX512_VNNI: Final = _AVX512.more("avx512vnni", {"avx512_vnni"}, ("-mavx512vnni", "-DFOREBAY_VNNI"), _INTEGERS)
_AVX512_BF16: Final = _AVX512_VNNI.more(
    *("avx512bf16", {"avx512_bf16"}, ("-mavx512bf16", "-DFOREBAY_BF16")),
    "arithmetic is in float32, and weights without codes take twice the memory",
)
VARIANTS: Final = (  # best first
    _AVX512_BF16.more(
        "amx", {"amx_tile", "amx_bf16"}, ("-DFOREBAY_AMX",), "prompts and many streams do without matrix tiles"
    ),
    _AVX512_BF16,
    _AVX512_VNNI,
    _AVX512,
    _AVX2.more("avx2vnni", {"avx_vnni"}, ("-mavxvnni", "-DFOREBAY_VNNI"), _INTEGERS),
    _AVX2,
)
AMX: Final = VARIANTS[0].name  # its kernels open codes, and round no inputs


def variants_for(flags: frozenset[str]) -> tuple[Variant, ...]:
    """The variants that a CPU with `flags` runs, best first."""
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def lacks(flags: frozenset[str]) -> str:
    """Name what a CPU with `flags` lacks for the better variants, with the cost of each; "" for the best variant."""
    return "; ".join(_lacks(flags))


def _lacks(flags: frozenset[str]) -> Iterator[str]:
    best = next(iter(variants_for(flags)), None)
    named: frozenset[str] = frozenset()
    for variant in reversed(VARIANTS if best is None else VARIANTS[: VARIANTS.index(best)]):
        missing = variant.needs - flags - named
        named |= missing
        yield f"without {', '.join(sorted(missing))}: {variant.cost}"
