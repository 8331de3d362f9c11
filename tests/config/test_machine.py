"""A container's limits count, under both versions of cgroups."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from forebay.config.machine import ENGINE_BYTES, Amount, available_memory, usable_cores

MIB = 1 << 20


def no_limit(which: int) -> tuple[int, int]:
    return resource.RLIM_INFINITY, resource.RLIM_INFINITY


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


def test_available_memory_version_1_counts_limits_around_a_container_that_its_mount_does_not_show(
    tmp_path: Path, proc: Path
) -> None:
    (proc / "self/cgroup").write_text("4:memory:/docker/0123\n0::/\n")
    memory = tmp_path / "cgroup/memory"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "memory.usage_in_bytes").write_text("4000\n")
    (memory / "memory.stat").write_text("total_inactive_file 1000\nhierarchical_memory_limit 9000\n")
    found = available_memory(tmp_path / "cgroup", proc, no_limit)
    assert found == Amount(6000, "left under the container's limit (hierarchical_memory_limit of 8.8 KiB)")


def test_a_machine_without_any_of_these_files_still_has_an_answer(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path).value > 0
    assert usable_cores(tmp_path, tmp_path).value >= 1


def test_the_limit_of_a_group_around_ours_counts_where_it_is_lower(tmp_path: Path, proc: Path) -> None:
    """A pod's limit around its container's, a slice's around its service's."""
    (proc / "self/cgroup").write_text("0::/slice/service\n")
    group(tmp_path, memory__max="max\n", memory__current="7\n")
    for name, limit, used in (("slice", 5000, 1000), ("slice/service", 9000, 500)):
        folder = tmp_path / "cgroup" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "cpu.max").write_text("max 100000\n" if name == "slice/service" else "100000 100000\n")
    found = available_memory(tmp_path / "cgroup", proc, no_limit)
    assert found.value == 4000
    assert "memory.max of 4.9 KiB" in found.why
    assert usable_cores(tmp_path / "cgroup", proc).value == 1


def test_a_limit_that_only_slows_down_counts_too(tmp_path: Path, proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    cgroup = group(tmp_path, memory__max="8000\n", memory__high="6000\n", memory__current="1000\n")
    assert available_memory(cgroup, proc, no_limit) == Amount(
        5000, "left under the container's limit (memory.high of 5.9 KiB)"
    )


def test_a_limit_on_address_space_leaves_what_the_engine_does_not_map_itself(tmp_path: Path, proc: Path) -> None:
    (proc / "meminfo").write_text("MemTotal: 40000000 kB\nMemAvailable: 30000000 kB\n")

    def limits(which: int) -> tuple[int, int]:
        return (4 << 30 if which == resource.RLIMIT_AS else 6 << 30), resource.RLIM_INFINITY

    found = available_memory(tmp_path, proc, limits)
    assert found.value == (4 << 30) - ENGINE_BYTES
    assert "ulimit -v" in found.why
    assert available_memory(tmp_path, proc, lambda which: (1 << 20, 1 << 20)).value == 0
