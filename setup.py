"""What pyproject.toml cannot say: a wheel that brings compiled kernels is for machines like the one that made it."""

import platform
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return any(Path("forebay/ops/prebuilt").glob("*.so"))


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of any Python, since ctypes loads them; of this processor, and a C library no older than this one."""
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", f"manylinux_{platform.libc_ver()[1].replace('.', '_')}_{platform.machine()}"


setup(distclass=WithKernels, cmdclass={"bdist_wheel": PlatformWheel})
