"""Engines that start together with an empty weights cache: one computes, the others map its file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import HANGS_S, wait_until
from tests.integration.forked import Forked, stock
from tests.models.tiny import make_oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_oracle("llama", hidden_size=64, intermediate_size=96).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("first_ends", ["with a file", "killed"])
def test_two_starts_with_an_empty_cache_compute_once(first_ends: str, model: Path, tmp_path: Path) -> None:
    folder, signs = tmp_path / "weights", tmp_path / "signs"
    signs.mkdir()

    def begin(name: str, speed: str) -> Forked:
        command = ["-m", "tests.engine.signalled_start", str(model), str(folder), str(signs), speed]
        with (tmp_path / name).open("wb") as output:
            return stock().start(command, os.environ, output=output.fileno())

    def result(name: str, process: Forked) -> Any:
        assert process.wait(HANGS_S) == 0
        return json.loads((tmp_path / name).read_text().splitlines()[-1])

    first = begin("first", "slow")
    wait_until(lambda: (signs / "computes").exists() or first.poll() is not None)
    second = begin("second", "quick")
    wait_until(lambda: (signs / "waits").exists() or second.poll() is not None)
    assert (first.poll(), second.poll()) == (None, None)
    if first_ends == "killed":
        first.send_signal(signal.SIGKILL)
        first.wait(HANGS_S)
        num_computed, outcome, tokens = result("second", second)
        assert (num_computed > 0, outcome) == (True, "written")
        second = begin("third", "quick")
    else:
        (signs / "go").touch()
        num_computed, outcome, tokens = result("first", first)
        assert (num_computed > 0, outcome) == (True, "written")
    assert result("third" if first_ends == "killed" else "second", second) == [0, "mapped", tokens]
    assert [path.suffix for path in folder.iterdir()] == [".weights"]
