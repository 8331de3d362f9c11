"""What pyproject.toml cannot say: a wheel that brings compiled kernels is for the machine they were compiled for."""

import struct
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

MACHINES = {62: "x86_64", 183: "aarch64"}  # by the number in an ELF file's header


def kernels() -> list[Path]:
    return sorted(Path("forebay/ops/prebuilt").glob("*.so"))


def machine() -> str:
    """The machine that the kernels are for."""
    found = {MACHINES[struct.unpack_from("<H", path.read_bytes(), 18)[0]] for path in kernels()}
    if len(found) != 1:
        raise SystemExit(f"forebay/ops/prebuilt has kernels for {', '.join(sorted(found))}: a wheel is for one machine")
    return found.pop()


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(kernels())


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of any Python, since ctypes loads them; of their processor, and the C library that forebay/ops/compiler.py
        holds them to."""
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", f"manylinux_2_28_{machine()}"


setup(distclass=WithKernels, cmdclass={"bdist_wheel": PlatformWheel})
