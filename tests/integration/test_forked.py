"""A forked process has what a new interpreter has, but for the time of its start."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.deadlines import HANGS_S
from tests.integration.forked import can_fork, stock
from tests.integration.tree import start

ARGUMENTS = ["-m", "tests.integration.shown", "a", "b c"]


def test_forked_process_has_arguments_variables_descriptors_and_signals_of_a_new_one(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "SHOWN": "here"}
    found: list[Any] = []
    for forked in (False, True):
        with (tmp_path / "output").open("wb") as output:
            if forked:
                process: Any = stock().start(ARGUMENTS, variables, output=output.fileno(), own_session=True)
            else:
                process = start(ARGUMENTS, variables, output.fileno(), ())
        assert process.wait(HANGS_S) == 3
        found.append(json.loads((tmp_path / "output").read_text()))
    new, forked_one = found
    assert forked_one == new
    assert (new["words"], new["variables"]["SHOWN"], new["leads"]) == (["a", "b c"], "here", True)


def test_stock_forks_no_process_with_another_key_or_another_cpu() -> None:
    assert can_fork(os.environ)
    assert can_fork({**os.environ, "FOREBAY_TEST_FAULTS": "1", "FOREBAY_FAULTS": "engine.load=memory"})
    assert not any(can_fork({**os.environ, name: "x"}) for name in ("FOREBAY_API_KEY", "FOREBAY_CPU", "PYTHONPATH"))
