"""The C++ compiler that builds the native kernels."""

from __future__ import annotations

import shutil
from typing import Final

COMPILERS: Final = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """The first of the usual names on the path."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)
