"""Everything that needs a GPU, in sections, the most valuable first: `make test-gpu` and `make bench-gpu`.

    python -m benchmarks.gpu tests
    python -m benchmarks.gpu bench              # every section but the tests, in 5 minutes
    python -m benchmarks.gpu int4 kernels

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from forebay.backends.backend import require_gpu
from forebay.base.errors import ConfigError

PYTHON: Final = sys.executable
# Plugins that a machine brings must not break the run: pytest-benchmark warns under xdist, and warnings are errors.
# Workers of xdist inherit variables, and load plugins before they read options.
OWN_PLUGINS: Final = MappingProxyType(
    {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_asyncio.plugin"}
)


@dataclass(frozen=True, slots=True)
class Section:
    """One process, its limit in seconds, the question that it answers, and variables of its environment."""

    limit_s: float
    question: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


# Sections of the table of models, the most important first: the limit, the question, and the cases.
TABLE: Final = {
    "llama": (70, "how fast is an 8B model in bfloat16?", ("llama",)),
    "int4": (25, "how fast is it in int4?", ("int4",)),
    "hybrid": (26, "how fast is a 7B hybrid?", ("falcon_h1",)),
    "mxfp4": (26, "how fast are 20B of experts in MXFP4?", ("gpt_oss",)),
    "delta": (25, "how fast are gated delta nets of 9B?", ("qwen3_5",)),
    "experts": (23, "how fast are 15B of experts in bfloat16?", ("qwen3_moe",)),
    "fp8": (20, "how fast are FP8 weights and activations?", ("fp8",)),
    "transformers": (15, "how fast is transformers' generate on the 8B model?", ("transformers",)),
    "more": (23, "how fast are codes of GGUF files, and KV in int8 and FP8?", ("q4", "kv_int8", "kv_fp8")),
}


def table(*cases: str) -> tuple[str, ...]:
    """Return the command that prints rows of the table."""
    return PYTHON, "-m", "benchmarks.gpu_table", *cases


SECTIONS: Final = {
    "tests": Section(
        240,
        "do the kernels equal the reference there, and have equal bits in any step?",
        (PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-n", "8", "--dist", "worksteal"),
        OWN_PLUGINS,
    ),
    **{name: Section(limit_s, question, table(*cases)) for name, (limit_s, question, cases) in TABLE.items()},
    "kernels": Section(
        28,
        "how fast are products, attention and scans, beside their floors, cuBLASLt and SDPA?",
        (PYTHON, "-m", "benchmarks.gpu_kernels", "--limit", "23"),
    ),
    "loading": Section(18, "how fast are weights loaded from a file?", (PYTHON, "-m", "benchmarks.gpu_loading")),
}


def run(section: Section) -> tuple[int | None, float]:
    """Run a section to its end or its limit. Returns the exit code, None at the limit, and the seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(section.command, start_new_session=True, env={**os.environ, **section.variables})
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
    parser.add_argument(
        "sections", nargs="+", choices=("bench", *SECTIONS), metavar="SECTION", help=", ".join(SECTIONS)
    )
    args = parser.parse_args(arguments)
    if args.sections == ["bench"]:
        args.sections = [name for name in SECTIONS if name != "tests"]
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
