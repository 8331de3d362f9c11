"""Everything that needs a GPU, in sections, the most valuable first: `make test-gpu` and `make bench-gpu`.

    python -m benchmarks.gpu tests kernels steps hybrid

Each section is a process with a limit in seconds, after which it is stopped; what it printed until then counts. Without
a GPU one line says so, and nothing runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from forebay.backends.backend import require_gpu
from forebay.base.errors import ConfigError

PYTHON: Final = sys.executable


@dataclass(frozen=True, slots=True)
class Section:
    """One process, its limit in seconds, and the question that it answers."""

    limit_s: float
    question: str
    command: tuple[str, ...]


SECTIONS: Final = {
    # Plugins that a machine brings must not break the run: pytest-benchmark warns under xdist, and warnings are errors.
    "tests": Section(
        240,
        "do the kernels equal the reference there, and have equal bits in any step?",
        (PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-n", "8", "--dist", "worksteal", "-p", "no:benchmark"),
    ),
    "kernels": Section(
        120,
        "how fast are products, attention and scans, beside their floors, cuBLASLt and SDPA?",
        (PYTHON, "-m", "benchmarks.gpu_kernels", "--limit", "110"),
    ),
    "steps": Section(
        90,
        "how fast is a decode step of an 8B model?",
        (PYTHON, "benchmarks/gpu_decode.py", "--like", "llama", "--batch", "1", "64", "256", "--repeats", "1"),
    ),
    "hybrid": Section(
        80,
        "how fast is a decode step of a 7B hybrid?",
        (PYTHON, "benchmarks/gpu_decode.py", "--like", "falcon_h1", "--batch", "1", "64", "--repeats", "1"),
    ),
}


def run(section: Section) -> tuple[int | None, float]:
    """Run a section to its end or its limit. Returns the exit code, None at the limit, and the seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(section.command, start_new_session=True)
    try:
        return process.wait(section.limit_s), time.monotonic() - begin
    except subprocess.TimeoutExpired:
        return None, section.limit_s
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=tuple(SECTIONS))
    args = parser.parse_args(arguments)
    try:
        require_gpu()
    except ConfigError as error:
        print(f"not run ({', '.join(args.sections)}): {error.message}")
        return 1
    outcomes: dict[str, str] = {}
    for name in args.sections:
        section = SECTIONS[name]
        print(f"== {name}: {section.question}", flush=True)
        code, seconds = run(section)
        outcomes[name] = f"stopped at {seconds:.0f} s" if code is None else f"exit code {code} in {seconds:.0f} s"
    print("== " + "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int(any(not outcome.startswith("exit code 0") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
