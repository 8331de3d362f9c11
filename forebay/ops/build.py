"""`python -m forebay.ops.build`: compile the kernels ahead of the first start.

`--every`: of every instruction set that this CPU has, as tests need them. `--wheel`: for other machines.
"""

from __future__ import annotations

import argparse
import sys

from forebay.base.cpu import this_cpu
from forebay.base.log import setup_logging
from forebay.base.toolchain import HERE
from forebay.base.variants import PREBUILT, VARIANTS
from forebay.ops.compiler import BuildError, library, prebuild


def main() -> int:
    """Compile the best variant for this CPU, or every one; 0 if ready, 1 if the torch ops will be used instead."""
    parser = argparse.ArgumentParser(prog="python -m forebay.ops.build", description=__doc__)
    parser.add_argument("--wheel", action="store_true", help="compile every variant into the package")
    parser.add_argument("--every", action="store_true", help="compile every variant that this CPU runs")
    machines = sorted({variant.machine for variant in VARIANTS})
    parser.add_argument(
        "--machine", choices=machines, default=HERE, help="the machine that --wheel compiles for (default: this one)"
    )
    arguments = parser.parse_args()
    setup_logging("info", process="build")
    try:
        if arguments.wheel:
            for variant in VARIANTS:
                if variant.machine == arguments.machine:
                    print(f"for wheels: {prebuild(variant, PREBUILT)}")
            return 0
        variants = this_cpu().variants
        if not variants:
            raise BuildError("this is not Linux on an x86-64 CPU with AVX2, or on an aarch64 CPU")
        for variant in variants if arguments.every else variants[:1]:
            print(f"native ops ready: {library(variant)}")
    except BuildError as error:
        outcome = "the wheel cannot be built" if arguments.wheel else "the slower torch ops will be used"
        print(f"native ops cannot be built, {outcome}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
