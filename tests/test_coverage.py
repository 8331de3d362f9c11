"""How much of `memory`, `requests` and `scheduler` their tests and those of the engine's core go through, branches too.

`make coverage` prints what they leave out. The floors may only rise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RUN = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
TESTS = [
    *("memory", "requests", "scheduler", "simulation"),
    *("engine/test_core.py", "engine/test_faults.py", "engine/test_recordings.py", "integration/test_cache_checks.py"),
    *("integration/test_prefix_files.py", "server/test_bad_input.py", "cli/test_plan_windows.py"),
]

FLOORS = {"memory": 99.0, "requests": 100.0, "scheduler": 98.9}  # percent of lines and branches together


def shares(report: dict[str, Any]) -> dict[str, float]:
    """Of each package, the percentage of lines and branches that ran."""
    ran: Counter[str] = Counter()
    all_of: Counter[str] = Counter()
    for name, file in report["files"].items():
        package, summary = Path(name).parts[1], file["summary"]
        ran[package] += summary["covered_lines"] + summary["covered_branches"]
        all_of[package] += summary["num_statements"] + summary["num_branches"]
    return {package: 100 * ran[package] / all_of[package] for package in all_of}


def below(shares: dict[str, float], floors: dict[str, float]) -> set[str]:
    return {package for package, floor in floors.items() if shares.get(package, 0.0) < floor}


def test_a_branch_that_is_not_taken_counts() -> None:
    summary = {"covered_lines": 90, "num_statements": 90, "covered_branches": 9, "num_branches": 10}
    found = shares({"files": {"forebay/memory/slots.py": {"summary": summary}}})
    assert found == {"memory": 99.0}
    assert below(found, {"memory": 99.5}) == {"memory"}
    assert not below(found, {"memory": 99.0})
    assert below(found, {"requests": 1.0}), "a package that nothing measured is not covered"


@pytest.mark.slow
def test_coverage_does_not_fall(tmp_path: Path) -> None:
    data = f"--data-file={tmp_path / 'coverage'}"

    def coverage(*command: str) -> None:
        subprocess.run([sys.executable, "-m", "coverage", command[0], data, *command[1:]], cwd=ROOT, check=True)

    coverage("run", *RUN, *(f"tests/{name}" for name in TESTS))
    coverage("report", "--show-missing", "--skip-covered")
    coverage("json", "-q", "-o", str(tmp_path / "report.json"))
    found = shares(json.loads((tmp_path / "report.json").read_text()))
    assert not below(found, FLOORS), found
