"""What an install shows of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.bootstrap import STEPS, Watched, of_compiler, of_pip

PIP = """\
Collecting torch==2.13.0
  Downloading https://example.org/torch-2.13.0-cp311.whl (190.5 MB)
Requirement already satisfied: numpy in x (2.4)
Installing collected packages: torch, sympy
Successfully installed sympy-1.14.0 torch-2.13.0
""".splitlines()


@pytest.mark.parametrize(
    ("num_lines", "shown"),
    [
        (0, "0 of 9 looked up"),
        (1, "1 of 9 looked up"),
        (2, "1 of 9, fetching torch-2.13.0-cp311.whl (190.5 MB)"),
        (4, "writing 2 packages"),
        (5, "2 packages"),
    ],
)
def test_what_pip_says_becomes_how_far_it_is(num_lines: int, shown: str) -> None:
    assert of_pip(9)(PIP[:num_lines]) == shown


def test_what_is_compiled_is_counted() -> None:
    lines = ["I build compiling_ops files=24", 'I build compiled file=a.cpp done="3 of 24" seconds=2']
    assert of_compiler(lines[:1]) == "looking for what is compiled already"
    assert of_compiler(lines) == "compiled 3 of 24 files"
    assert of_compiler([*lines, "native ops ready: /x.so\n"]) == "native ops ready: /x.so"


def test_a_step_that_fails_shows_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Watched(sys.executable, "-c", "print('what is wrong'); raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        failing.show(STEPS[2], of_pip(1))
    text = capsys.readouterr().out
    assert "[3/5] packages: failed" in text
    assert "what is wrong" in text
    fine = Watched(sys.executable, "-c", "print('Successfully installed a-1')")
    fine.show(STEPS[2], of_pip(1))
    assert "[3/5] packages: 1 packages" in capsys.readouterr().out
