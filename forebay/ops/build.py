"""`python -m forebay.ops.build`: compile the kernels ahead of the first start.

`--every`: of every instruction set that this CPU has, as tests need them. `--wheel`: for other machines.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Final

from forebay.base.cpu import this_cpu
from forebay.base.log import setup_logging
from forebay.base.toolchain import HERE
from forebay.base.variants import PREBUILT, VARIANTS, Variant
from forebay.ops.compiler import BuildError, library, prebuild

_FIRST_ERROR: Final = re.compile(r"[^/\s]+ (?:fatal )?error: .*")  # with the name of the file


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
        if arguments.every:
            return _compile_each(variants)
        print(f"native ops ready: {library(variants[0])}")
    except BuildError as error:
        outcome = "the wheel cannot be built" if arguments.wheel else "the slower torch ops will be used"
        print(f"native ops cannot be built, {outcome}: {error}", file=sys.stderr)
        return 1
    return 0


def _compile_each(variants: Sequence[Variant]) -> int:
    """Compile all variants, those behind one that fails, too. Print one line for each; 1 if one has failed."""
    outcome = 0
    for variant in variants:
        try:
            print(f"native ops ready: {library(variant)}")
        except BuildError as error:
            outcome, found = 1, _FIRST_ERROR.search(str(error))
            why = found[0] if found else str(error).partition("\n")[0]
            print(f"the kernel variant {variant.name} cannot be compiled: {why}", file=sys.stderr)
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
