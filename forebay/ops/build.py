"""`python -m forebay.ops.build`: compile the kernels ahead of the first start."""

from __future__ import annotations

import sys

from forebay.base.log import setup_logging
from forebay.ops.compiler import BuildError, library, usable_variants


def main() -> int:
    """Compile the best variant for this CPU; 0 if it is ready, 1 if the torch ops will be used instead."""
    setup_logging("info", process="build")
    variants = usable_variants()
    try:
        if not variants:
            raise BuildError("this is not Linux on an x86-64 CPU with AVX2")
        print(f"native ops ready: {library(variants[0])}")
    except BuildError as error:
        print(f"native ops cannot be built, the slower torch ops will be used: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
