"""A wheel is for any platform, unless it brings compiled kernels."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forebay.base.package import ROOT
from tests.deadlines import HANGS_S

BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def build_wheel(folder: Path, *, prebuilt: bool) -> Path:
    """Of a package that is ours but for its contents."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "forebay/base/package.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in ("forebay", "forebay/base", "forebay/ops"):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "__init__.py").touch()
    if prebuilt:
        (folder / "forebay/ops/prebuilt").mkdir()
        (folder / "forebay/ops/prebuilt/avx2-0123-4567.so").write_bytes(b"compiled")
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS_S, check=True)
    return folder / done.stdout.splitlines()[-1]


def test_a_wheel_without_compiled_kernels_is_for_any_platform(tmp_path: Path) -> None:
    assert build_wheel(tmp_path, prebuilt=False).name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="kernels are compiled on Linux with glibc")
def test_a_wheel_with_compiled_kernels_is_for_this_processor_and_this_c_library(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, prebuilt=True)
    version = platform.libc_ver()[1].replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-manylinux_{version}_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "forebay/ops/prebuilt/avx2-0123-4567.so" in names
    about = next(name for name in names if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(about).decode()
