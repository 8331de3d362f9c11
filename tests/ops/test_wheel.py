"""A wheel is for any platform, unless it brings compiled kernels: then for their machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forebay.base.cpu import this_cpu
from forebay.base.package import ROOT
from forebay.ops.compiler import library, too_new_for_wheels
from tests.deadlines import HANGS_S

BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def build_wheel(folder: Path, *kernels_for: int) -> subprocess.CompletedProcess[str]:
    """Of a package that is ours but for its contents; `kernels_for`: machines by their numbers in ELF."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "forebay/base/package.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in ("forebay", "forebay/base", "forebay/ops"):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "__init__.py").touch()
    for number in kernels_for:
        (folder / "forebay/ops/prebuilt").mkdir(exist_ok=True)
        (folder / f"forebay/ops/prebuilt/{number}-0123.so").write_bytes(
            b"\x7fELF".ljust(18) + number.to_bytes(2, "little")
        )
    command = [sys.executable, "-c", BUILD]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS_S, check=False)


@pytest.mark.slow
def test_wheel_without_compiled_kernels_is_for_any_platform(tmp_path: Path) -> None:
    assert build_wheel(tmp_path).stdout.strip().endswith("-py3-none-any.whl")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "machine"), [(62, "x86_64"), (183, "aarch64")])
def test_wheel_with_compiled_kernels_is_for_their_machine_and_c_libraries_from_2018(
    tmp_path: Path, number: int, machine: str
) -> None:
    wheel = tmp_path / build_wheel(tmp_path, number).stdout.splitlines()[-1]
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"forebay/ops/prebuilt/{number}-0123.so" in names
    about = next(name for name in names if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(about).decode()


@pytest.mark.slow
def test_wheel_with_kernels_for_two_machines_is_refused(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, 62, 183)
    assert done.returncode != 0
    assert "has kernels for aarch64, x86_64: a wheel is for one machine" in done.stderr


@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_compiled_kernels_need_no_newer_libraries_than_a_wheel_may() -> None:
    assert too_new_for_wheels(library(this_cpu().variants[0])) == []
