"""An engine process without a model: `python -m tests.engine.fake_engine FD PARENT`. Its `model_path` is a script:
`load=S,step=S` seconds, or `refuse` / `crash` during the load."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import msgspec

from forebay.base import fault
from forebay.base.clock import RunClock
from forebay.base.errors import ModelError
from forebay.config.engine_config import EngineConfig
from forebay.engine.frames import Ready
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.process import our_buffer, our_end, serve
from tests.engine.engine_fakes import READY, changed, fake_core

ENTRY = ("-P", "-m", "tests.engine.fake_engine")


def script(load: float = 0.0, step: float = 0.0, then: str = "") -> EngineConfig:
    return changed(model_path=f"{load},{step},{then}")


def build(config: EngineConfig, clock: RunClock) -> tuple[EngineCore, Ready]:
    load, step, then = config.model_path.split(",")
    fault.point("engine.load")
    time.sleep(float(load))
    if then == "refuse":
        raise ModelError("no such checkpoint: pull it first")
    if then == "crash":
        os.abort()
    core, _ = fake_core(config, step_s=float(step), clock=clock)
    return core, msgspec.structs.replace(READY, pid=os.getpid())


def main() -> NoReturn:
    words = sys.argv[1:]
    os._exit(serve(our_end(words), build, buffer=lambda: our_buffer(words)))


if __name__ == "__main__":
    main()
