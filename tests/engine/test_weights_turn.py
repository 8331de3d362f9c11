"""Engines that start together with an empty weights cache: one computes, the others map its file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import wait_until
from tests.models.tiny import make_oracle

# Starts an engine with the cache in `folder`. With "slow" it stops at the first rows that it quantizes, until "go" is
# there. Files tell the test how far it is; in the end it prints how often it quantized, the outcome and its tokens.
_START = """
import json, logging, sys, time
from pathlib import Path
from forebay.engine.lifecycle import packed_cache
from forebay.formats.quantization import Quantization
from forebay.ops.native.linear import NativeLinear
from tests.engine.starts import PROMPTS, start, tokens_of

model, folder, signs, speed = map(Path, sys.argv[1:])
packed_cache.cache_of_weights = lambda: folder
packed_cache.LEAST_BYTES = dict.fromkeys(Quantization, 0)

class Sign(logging.Handler):
    def emit(self, record):
        if "weights_cache_waits" in record.getMessage():
            (signs / "waits").touch()

logging.getLogger("forebay").addHandler(Sign())
logging.getLogger("forebay").setLevel(logging.INFO)
original, computed = NativeLinear.quantize_into, []

def quantize_into(ops, values, out, first):
    computed.append(first)
    (signs / "computes").touch()
    while str(speed) == "slow" and not (signs / "go").exists():
        time.sleep(0.01)
    original(ops, values, out, first)

NativeLinear.quantize_into = quantize_into
core, outcome = start(model)
print(json.dumps([len(computed), outcome.split()[0], tokens_of(core, PROMPTS)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_oracle("llama", hidden_size=64, intermediate_size=96).save_pretrained(path)
    return path


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize("first_ends", ["with a file", "killed"])
def test_two_starts_with_an_empty_cache_compute_once(first_ends: str, model: Path, tmp_path: Path) -> None:
    folder, signs = tmp_path / "weights", tmp_path / "signs"
    signs.mkdir()

    def begin(speed: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _START, str(model), str(folder), str(signs), speed]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def result(process: subprocess.Popen[str]) -> Any:
        return json.loads(process.communicate()[0].splitlines()[-1])

    first = begin("slow")
    wait_until(lambda: (signs / "computes").exists() or first.poll() is not None)
    second = begin("quick")
    wait_until(lambda: (signs / "waits").exists() or second.poll() is not None)
    assert (first.poll(), second.poll()) == (None, None)
    if first_ends == "killed":
        first.send_signal(signal.SIGKILL)
        first.communicate()
        num_computed, outcome, tokens = result(second)
        assert (num_computed > 0, outcome) == (True, "written")
        second = begin("quick")
    else:
        (signs / "go").touch()
        num_computed, outcome, tokens = result(first)
        assert (num_computed > 0, outcome) == (True, "written")
    assert result(second) == [0, "mapped", tokens]
    assert [path.suffix for path in folder.iterdir()] == [".weights"]
