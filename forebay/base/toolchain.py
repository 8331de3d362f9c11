"""The C++ compiler that builds the native kernels."""

from __future__ import annotations

import platform
import shutil
from typing import Final

HERE: Final = platform.machine()  # as `uname -m` names it
COMPILERS: Final = ("g++", "clang++", "c++")


def compilers(machine: str = HERE) -> tuple[str, ...]:
    """The usual names of compilers for a machine: for another than this a cross compiler, as Debian names it."""
    return COMPILERS if machine == HERE else (f"{machine}-linux-gnu-g++",)


def find_compiler(machine: str = HERE) -> str | None:
    """The first of the usual names on the path."""
    return next(filter(None, map(shutil.which, compilers(machine))), None)
