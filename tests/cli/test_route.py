"""`forebay route` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import HANGS_S, wait_until

SERVERS = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10"]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [pytest.param(SERVERS, marks=pytest.mark.slow), []], ids=["servers", "none"])
def test_route_without_a_terminal_prints_the_address_at_once(servers: list[str], tmp_path: Path) -> None:
    """Without servers, it also prints what is missing."""
    words = ["route", "--port", "0", *servers]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "output").open("wb") as output:
        router = subprocess.Popen([sys.executable, "-m", "forebay", *words], stdout=output, env=environment)
    try:
        wait_until(lambda: "routing at http://127.0.0.1:" in (tmp_path / "output").read_text())
        wait_until(lambda: ("no server yet: " in (tmp_path / "output").read_text()) != bool(servers))
        router.terminate()
        assert router.wait(HANGS_S) == 0
    finally:
        router.kill()
        router.wait()
