"""The processor as one value: what FOREBAY_CPU replaces, and which processes see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base.child import environment
from forebay.base.cpu import CPU_VARIABLE, ONEDNN_ISA, Cpu, read_flags, simulate, this_cpu
from forebay.base.errors import ConfigError
from forebay.base.variants import ARM_VARIANTS, X86_VARIANTS, Variant

EVERYTHING = X86_VARIANTS[0].needs | X86_VARIANTS[4].needs


@pytest.mark.parametrize("variant", X86_VARIANTS, ids=lambda variant: variant.name)
def test_simulate_each_variant_gives_its_flags_and_no_better_one(variant: Variant) -> None:
    cpu = simulate(variant.name, EVERYTHING)
    assert (cpu.flags, cpu.variants[0], cpu.simulated) == (variant.needs, variant, variant.name)
    assert bool(cpu.bfloat16) == ("avx512_bf16" in variant.needs)
    assert cpu.library_limits["ONEDNN_MAX_CPU_ISA"] == ONEDNN_ISA[variant.name]
    assert cpu.library_limits["ATEN_CPU_CAPABILITY"] == ("avx512" if "avx512f" in variant.needs else "avx2")


@pytest.mark.parametrize("variant", ARM_VARIANTS, ids=lambda variant: variant.name)
def test_simulate_on_arm_gives_the_flags_of_the_variant_and_no_better_one(variant: Variant) -> None:
    cpu = simulate(variant.name, ARM_VARIANTS[0].needs)
    assert (cpu.flags, cpu.variants[0]) == (variant.needs, variant)
    assert cpu.bfloat16 == (("bf16",) if variant.name == "bf16" else ())
    assert cpu.library_limits == {"ATEN_CPU_CAPABILITY": "default"}
    better = ARM_VARIANTS[: ARM_VARIANTS.index(variant)]
    assert all(each.cost in cpu.lacks for each in better)
    assert bool(cpu.lacks) == bool(better)


# As Linux prints the features of a Neoverse V1, a Neoverse N1 and a Cortex-A72.
@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("fp asimd evtstrm aes crc32 atomics fphp asimdhp asimdrdm dcpop sha3 asimddp sve i8mm bf16 dgh rng", "bf16"),
        (
            "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
            "dotprod",
        ),
        ("fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", "neon"),
    ],
)
def test_read_flags_of_an_arm_cpu_choose_the_variant(tmp_path: Path, features: str, best: str) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: {features}\nCPU part\t: 0xd40\n"
    )
    assert Cpu(flags=read_flags(tmp_path)).variants[0].name == best


def test_simulate_none_gives_a_cpu_without_kernels() -> None:
    cpu = simulate("none", EVERYTHING)
    assert (cpu.variants, cpu.bfloat16, cpu.library_limits["ATEN_CPU_CAPABILITY"]) == ((), (), "default")


def test_simulate_better_cpu_raises_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"FOREBAY_CPU=avx512vnni: this CPU lacks avx512_vnni, .*: use avx2, none"):
        simulate("avx512vnni", X86_VARIANTS[-1].needs)


def test_simulate_unknown_name_raises_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="FOREBAY_CPU=sse9: no such CPU is known: use avx2, none, or unset it"):
        simulate("sse9", X86_VARIANTS[-1].needs)


def test_this_cpu_without_the_variable_is_the_processor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    cpu = this_cpu()
    assert (cpu.simulated, cpu.library_limits) == ("", {})
    assert cpu == this_cpu({})
    assert "avx2" not in Cpu(flags=frozenset()).flags


def test_read_flags_without_proc_is_empty(tmp_path: Path) -> None:
    assert read_flags(tmp_path) == frozenset()


_ASKED = """
from forebay.base.child import environment
import subprocess, sys
script = (
    "import torch; from forebay.backends import make_ops; from forebay.base.cpu import this_cpu;"
    "print(make_ops('native', 1).name, torch.backends.cpu.get_cpu_capability(), this_cpu().simulated)"
)
print(subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_environment_of_children_passes_the_simulated_cpu_to_kernels_and_torch() -> None:
    """Through two processes: a fleet starts servers, and they start engines."""
    done = subprocess.run(
        [sys.executable, "-c", _ASKED],
        env={**environment(), CPU_VARIABLE: "avx2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["native-avx2", "AVX2", "avx2"], done.stderr
