"""`python -m forebay.ops.build`: compile the kernels ahead of the first start; `--wheel`: for other machines."""

from __future__ import annotations

import argparse
import sys

from forebay.base.cpu import this_cpu
from forebay.base.log import setup_logging
from forebay.base.toolchain import HERE
from forebay.base.variants import PREBUILT, VARIANTS
from forebay.ops.compiler import BuildError, library, prebuild


def main() -> int:
    """Compile the best variant for this CPU; 0 if it is ready, 1 if the torch ops will be used instead."""
    parser = argparse.ArgumentParser(prog="python -m forebay.ops.build", description=__doc__)
    parser.add_argument("--wheel", action="store_true", help="compile every variant into the package")
    wheel: bool = parser.parse_args().wheel
    setup_logging("info", process="build")
    try:
        if wheel:
            for variant in (each for each in VARIANTS if each.machine == HERE):
                print(f"for wheels: {prebuild(variant, PREBUILT)}")
            return 0
        variants = this_cpu().variants
        if not variants:
            raise BuildError("this is not Linux on an x86-64 CPU with AVX2 or an aarch64 one")
        print(f"native ops ready: {library(variants[0])}")
    except BuildError as error:
        print(f"native ops cannot be built, the slower torch ops will be used: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
