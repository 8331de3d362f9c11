"""The process of a rank above 0: it loads its share of the model and executes the log until rank 0 ends."""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from forebay.base.exit_codes import EXIT_FAILED
from forebay.base.log import event, get_logger, setup_logging
from forebay.base.signals import ENDING
from forebay.config.engine_config import EngineConfig
from forebay.engine.lifecycle.sleep import Memory
from forebay.engine.loop.process import PEER_GONE_GRACE_S, end_with_parent
from forebay.engine.ranks.follower import Follower
from forebay.engine.ranks.processes import read_configuration
from forebay.engine.ranks.ring import RING_BYTES, RingReader
from forebay.requests.step_plan import CapturingRunner

Build = Callable[[EngineConfig, int, int, Sequence[int]], tuple[CapturingRunner, Memory, int]]
"""See `build_rank`."""

log = get_logger("engine")


def follow(follower: Follower, ring: RingReader) -> None:
    """Execute entries until rank 0 ends. Raises LogBroken for a gap in the log, and RuntimeError for an entry that
    failed here: the exchanges of this rank are then no longer those of the others."""
    while (record := ring.read()) is not None:
        follower.take(record)
        number, outcome = follower.land()
        ring.done(number, outcome)
        if outcome.error:
            raise RuntimeError(f"log entry {number} failed: {outcome.error}")


def _exit_with_rank_0(places: int) -> None:
    """From a thread of its own, so that neither a long step nor loading weights is in the way."""

    def watch() -> None:
        poll = select.poll()
        poll.register(places, 0)
        poll.poll()
        time.sleep(PEER_GONE_GRACE_S)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="rank-0-watch", daemon=True).start()


def run(places: int, outcomes: int, ring: int, exchange: int, build: Build) -> None:
    """Be a rank at these descriptors, until rank 0 ends."""
    _exit_with_rank_0(places)
    configured = read_configuration(places)
    if configured is None:
        return
    config, rank = configured.config, configured.rank
    setup_logging(config.log_level, process=f"rank-{rank}", format=config.log_format)
    runner, memory, weight_bytes = build(config, rank, exchange, configured.processes)
    gc.freeze()
    gc.enable()
    log.info(event("rank_ready", rank=rank, weight_bytes=weight_bytes))
    follow(Follower(rank, runner, memory), RingReader(mmap.mmap(ring, RING_BYTES), places, outcomes))


def _build(
    config: EngineConfig, rank: int, exchange: int, processes: Sequence[int]
) -> tuple[CapturingRunner, Memory, int]:
    from forebay.engine.loop.build import build_rank  # imports torch, which this rank's watch does not wait for

    return build_rank(config, rank, exchange, processes)


def main(build: Build = _build) -> NoReturn:
    """Run the process, and end it with an exit status."""
    gc.disable()  # until all is loaded
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    places, outcomes, ring, exchange, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    code = 0
    try:
        run(places, outcomes, ring, exchange, build)
    except Exception as error:
        log.critical(event("rank_ended", reason=str(error)), exc_info=error)
        code = EXIT_FAILED
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
