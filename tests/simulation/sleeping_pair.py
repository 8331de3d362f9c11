"""Two schedulers with a wire between them, of which either sleeps, and takes other weights, at random moments.

python -m tests.simulation.sleeping_pair --seeds 0:3000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from forebay.engine.frames import Release, Resume, UpdateWeights
from forebay.requests.updates import Update
from tests.simulation.command_line import command_line
from tests.simulation.pair import Half, Pair, PairOutcome, random_pair_of
from tests.simulation.simulator import scaled_down
from tests.simulation.sleeping import Sleeping


@dataclass(frozen=True, kw_only=True)
class SleepingPairOutcome(PairOutcome):
    sleeps: int = 0
    updates: int = 0
    kept: int = 0


class SleepingHalf(Sleeping, Half):
    """`failed` are rooms of requests that have failed here: whoever sent both halves will give up the other."""

    other: SleepingHalf

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.failed: list[int] = []

    def _heard(self, updates: list[Update]) -> None:
        live = self.oracles.live
        self.failed += [live[update.request_id].room for update in updates if update.failure]
        super()._heard(updates)

    def _ask(self, frame: Release | Resume | UpdateWeights) -> None:
        self.causes.rested = True
        super()._ask(frame)

    def _send_orders(self) -> None:
        super()._send_orders()
        self.causes.rested = self.core.sleeper.away

    def _what(self) -> str:
        """Who computes with older weights than the other takes newer ones: till then the two do nothing together."""
        if self.scheduler.queues.weight_version < self.other.scheduler.queues.weight_version:
            return self.sleeps.choice(["update", "release and update"])
        return self.sleeps.choice(["pause", "release", "release", "release and update"])

    def _goes_on(self) -> None:
        self.oracles.liveness.went_on(self.now)

    def _expect_other_tokens(self) -> None:
        super()._expect_other_tokens()
        self.oracles.liveness.weights_changed()

    @property
    def done(self) -> bool:
        return super().done and not self.core.sleeper.away

    def calm(self) -> None:
        super().calm()
        self.chance = 0.0


AnySleeping = TypeVar("AnySleeping", bound=SleepingHalf, covariant=True)


class SleepingPair(Pair[AnySleeping]):
    patience = 0.0  # chance that a client waits until both engines are awake, with the same weights

    def arrive(self) -> None:
        """Begin a request, or let its client wait."""
        if self.patience and not self._can_meet and self.others.random() < self.patience:
            return
        super().arrive()

    @property
    def _can_meet(self) -> bool:
        prefill, decode = self.prefill.scheduler.queues, self.decode.scheduler.queues
        return self._gets_on and prefill.weight_version == decode.weight_version

    def sleeps(self, rng: Random) -> None:
        chance = rng.choice([0.02, 0.06])
        for half, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            half.other, half.chance = other, chance * rng.choice([0, 1, 1])
            half.core.sleeper.keep_prefix_cache, half.sleeps = rng.random() < 0.5, Random(rng.random())

    def tick(self) -> None:
        for half in (self.prefill, self.decode):
            while half.failed:
                self.give_up(half.other, half.failed.pop())
        super().tick()

    def run(self) -> SleepingPairOutcome:
        done, halves = super().run(), (self.prefill, self.decode)
        return SleepingPairOutcome(
            **vars(done),
            sleeps=sum(half.num_sleeps for half in halves),
            updates=sum(half.num_updates for half in halves),
            kept=sum(half.num_kept for half in halves),
        )


def run_seed(seed: int) -> SleepingPairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down():
            pair = random_pair_of(seed, SleepingPair[SleepingHalf], SleepingHalf)
            pair.sleeps(Random(f"{seed} sleeps"))
            return pair.run()
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.sleeping_pair --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.sleeping_pair", __doc__ or "", run_seed, SleepingPairOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
