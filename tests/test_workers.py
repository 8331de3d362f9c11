"""Tests in forked processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "conftest.py": """
from tests.workers import pytest_addoption, pytest_runtestloop
import os, pytest

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("of")
    with open(os.environ["RECORD"], "a") as record:
        record.write("session ended\\n")

@pytest.fixture(scope="module")
def made(request):
    with open(os.environ["RECORD"], "a") as record:
        record.write(f"{request.path.stem} {os.getpid()}\\n")
""",
    "test_few.py": """
def test_passes(made, folder): pass
""",
    "test_many.py": """
import os

def test_prints(made, folder):
    print("spo" + "ken")
    assert 1 == 2

def test_ends_its_process(made): os._exit(7)
def test_behind_it(made, folder, tmp_path): pass
""",
    "test_long.py": """
import pytest

@pytest.mark.long
def test_long(made): pass
""",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path


def run(modules: Path, *options: str) -> tuple[int, str, list[str]]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=modules, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, (modules / "record").read_text().splitlines()


def test_workers_each_module_is_one_process_and_a_test_that_ends_it_fails(modules: Path) -> None:
    code, output, record = run(modules, "--workers", "2")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "2 failed, 3 passed" in output
    assert "the test ended its process, with exit code 7" in output
    assert output.count("spoken") == 1
    made = [line.split()[0] for line in record if line != "session ended"]
    assert sorted(made) == [
        "test_few",
        "test_long",
        "test_many",
        "test_many",
    ]  # in the worker that took the place, again
    assert made[0] in ("test_long", "test_many"), "the module with a test marked long comes first, then the longest"


def test_workers_first_failure_ends_the_run_if_asked(modules: Path) -> None:
    code, output, record = run(modules, "--workers", "2", "-x", "-k", "many")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed" in output
    assert "passed" not in output
    assert [line.split()[0] for line in record] == ["test_many", "session"]
