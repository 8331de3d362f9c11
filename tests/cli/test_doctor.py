"""What `forebay doctor` finds on machines that are not this one."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from forebay.base.cpu import Cpu
from forebay.base.variants import VARIANTS
from forebay.cli import doctor, doctor_machine
from forebay.cli.doctor_machine import Finding, Verdict
from forebay.cli.main import main
from forebay.config.gpu import GpuMemory


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_swapped_memory_and_pages_that_are_never_large_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "SwapTotal: 4194304 kB\nSwapFree: 1048576 kB\n")
    assert doctor_machine.swap(tmp_path) == Finding(
        "swap", Verdict.NOTE, "3.0 GiB of 4.0 GiB used", doctor_machine.swap(tmp_path).fix
    )
    write(tmp_path / "meminfo", "SwapTotal: 4194304 kB\nSwapFree: 4194304 kB\n")
    assert doctor_machine.swap(tmp_path).verdict is Verdict.OK
    setting = write(tmp_path / "kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    assert str(setting) in doctor_machine.large_pages(tmp_path).fix
    setting.write_text("always [madvise] never\n")
    assert (doctor_machine.large_pages(tmp_path).what, doctor_machine.large_pages(tmp_path).fix) == ("madvise", "")


def test_a_container_s_cores_are_noted_with_those_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/cpu.max", "50000 100000\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    found = doctor_machine.cores(tmp_path / "cgroup", tmp_path / "proc")
    assert found.verdict is Verdict.NOTE
    assert "the container may use 0.5 of" in found.what
    assert "raise it" in found.fix


def test_who_takes_the_cores_is_named(tmp_path: Path) -> None:
    write(tmp_path / "self/cgroup", "0::/none\n")
    spent = "7 (a b) c) S " + "0 " * 10 + "{} 0\n"
    stat = write(tmp_path / "7/stat", spent.format(100))
    busy = doctor_machine.load(tmp_path, wait=lambda seconds: void(stat.write_text(spent.format(100_000))))
    assert busy.verdict is Verdict.NOTE
    assert "a b) c (7)" in busy.what
    assert doctor_machine.load(tmp_path, wait=lambda seconds: None).verdict is Verdict.OK


def void(result: object) -> None:
    """Of a lambda that is to have none."""


@pytest.mark.parametrize(
    ("memory", "cuda", "words"),
    [
        (None, True, "1 of NVIDIA, without a driver"),
        (GpuMemory(2 << 30, 1 << 30), False, "torch's build has no CUDA"),
        (GpuMemory(2 << 30, 1 << 30), True, "1.0 GiB of 2.0 GiB free: --device cuda"),
    ],
)
def test_a_gpu_without_its_driver_or_torch_s_cuda_is_noted(
    memory: GpuMemory | None, cuda: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "gpu_memory", lambda: memory)
    write(tmp_path / "bus/pci/devices/0/vendor", "0x10de\n")
    write(tmp_path / "bus/pci/devices/0/class", "0x030200\n")
    found = doctor_machine.gpu(tmp_path, lambda: cuda)
    assert words in found.what
    assert (found.verdict is Verdict.OK) == (memory is not None and cuda) == (found.fix == "")


def test_slow_memory_is_noted_with_what_reads_less() -> None:
    assert "--quantization int4" in doctor_machine.bandwidth(lambda: 3.0).fix
    fast = doctor_machine.bandwidth(lambda: 43.0)
    assert (fast.verdict, fast.fix) == (Verdict.OK, "")
    assert "at most 10.0 times a second" in fast.what


def test_a_setting_that_leaves_instructions_unused_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "this_cpu", lambda: Cpu(flags=VARIANTS[0].needs))
    monkeypatch.setenv("FOREBAY_KERNELS", "avx2")
    assert doctor.kernels().what == "FOREBAY_KERNELS=avx2, where this CPU runs amx"


@pytest.mark.parametrize(("version", "wanted"), [(None, "torch<9,>=2"), ("2.12.1+cu128", "torch==2.12.1")])
def test_torch_is_mended_by_the_cpu_build_of_a_release_that_is_taken(
    version: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For who has a wheel: what the package index has under our own name is not ours."""

    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["torch-memory-saver>=0; extra == 'cuda'", "torch<9,>=2"]
    )
    monkeypatch.setattr(doctor, "has_cuda", lambda: True)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    fix = doctor.torch(tmp_path / "no driver").fix.partition(" -m pip install ")[2]
    assert fix == f"--force-reinstall '{wanted}' --index-url {doctor.TORCH_CPU_INDEX}"


def test_programs_get_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: int, embedded_model: Path
) -> None:
    monkeypatch.setattr(doctor_machine, "read_gb_s", lambda threads: 30.0)
    assert main(["doctor", "--json", "--port", str(free_port)]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert {row["verdict"] for row in found} <= {"ok", "note", "problem"}
    assert {"bandwidth", "load", "swap", "GPU", "native kernels"} <= {row["subject"] for row in found}
    assert all(row["fix"] for row in found if row["verdict"] != "ok")
