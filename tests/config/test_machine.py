"""A container's limits count, under both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.config.machine import available_memory, usable_cores

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable:   2048 kB\n")
    return folder


def group(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_without_a_limit_the_machine_counts(tmp_path: Path, proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    cgroup = group(tmp_path, memory__max="max\n", memory__current="5\n", cpu__max="max 100000\n")
    assert available_memory(cgroup, proc).value == 2 * MIB
    assert "usable core" in usable_cores(cgroup, proc).why


def test_version_2_limits_count_and_inactive_file_pages_are_free(tmp_path: Path, proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/some/service\n")
    cgroup = group(
        tmp_path,
        memory__max=f"{MIB}\n",
        memory__current=f"{MIB - 1000}\n",
        memory__stat="anon 1\ninactive_file 500\n",
        cpu__max="50000 100000\n",
    )
    assert available_memory(cgroup, proc).value == 1500
    assert usable_cores(cgroup, proc).value == 1


def test_version_1_limits_count(tmp_path: Path, proc: Path) -> None:
    (proc / "self/cgroup").write_text("4:memory:/job\n1:cpu:/job\n0::/\n")
    memory = tmp_path / "cgroup/memory/job"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("9000\n")
    (memory / "memory.usage_in_bytes").write_text("4000\n")
    cpu = tmp_path / "cgroup/cpu/job"
    cpu.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert available_memory(tmp_path / "cgroup", proc).value == 5000
    assert "container" not in usable_cores(tmp_path / "cgroup", proc).why


def test_a_machine_without_any_of_these_files_still_has_an_answer(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path).value > 0
    assert usable_cores(tmp_path, tmp_path).value >= 1
