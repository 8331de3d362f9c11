"""The simulator of two engines with compressed KV that sleep, and of clients that mostly wait until both are awake:
more requests are whole than in `sleeping_pair`, and rings are copied to the host and between engines.

python -m tests.simulation.compressed_pair --seed 1234              replay one seed
python -m tests.simulation.compressed_pair --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tests.simulation.command_line import command_line
from tests.simulation.compressed import CompressedHalf, CompressedOutcome, EntriesAsleep, runners_of
from tests.simulation.pair import random_pair_of
from tests.simulation.simulator import scaled_down
from tests.simulation.sleeping_pair import SleepingHalf, SleepingPair, SleepingPairOutcome
from tests.simulation.wire import WireFaults
from tests.simulation.workload import Faults

PATIENCE: Final = 0.95
RARELY: Final = 0.3  # times as many rests


@dataclass(frozen=True, kw_only=True)
class CompressedPairOutcome(SleepingPairOutcome):
    """`entries` of compressed KV were read. Requests were `copied` to the host and back, with their rings, and arrived
    with them (`prebuilt`)."""

    entries: int = 0
    copied: int = 0
    prebuilt: int = 0


class CompressedSleepingHalf(EntriesAsleep, CompressedHalf, SleepingHalf):
    pass


def run_seed(seed: int) -> CompressedPairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down():
            pair = random_pair_of(seed, SleepingPair[CompressedSleepingHalf], CompressedSleepingHalf)
            pair.sleeps(Random(f"{seed} sleeps"))
            pair.patience = PATIENCE
            for half in (pair.prefill, pair.decode):
                half.chance *= RARELY
            if seed % 2:  # nothing goes wrong but what rests bring with them
                pair.wire.faults, pair.recovers = WireFaults(late=pair.wire.faults.late), 0.0
                for half in (pair.prefill, pair.decode):
                    half.faults = Faults()
            runners = runners_of(pair)
            done = pair.run()
            counts = CompressedOutcome.of(runners)
            return CompressedPairOutcome(
                **vars(done), entries=counts.entries, copied=counts.copied, prebuilt=counts.prebuilt
            )
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.compressed_pair --seed {seed}")
        raise


def run_seeds(seeds: Iterable[int]) -> CompressedPairOutcome:
    return sum(map(run_seed, seeds), CompressedPairOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line(
        "tests.simulation.compressed_pair", __doc__ or "", run_seed, CompressedPairOutcome(seeds=0), argv
    )


if __name__ == "__main__":
    sys.exit(main())
