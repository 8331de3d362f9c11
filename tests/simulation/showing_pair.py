"""The simulator of two engines with pictures in prompts: prefill encodes them, and decode does so for requests that it
computes itself.

python -m tests.simulation.showing_pair --seed 1234              replay one seed
python -m tests.simulation.showing_pair --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_values
from random import Random
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from forebay.config.engine_config import SchedulerConfig
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous, Tail
from forebay.requests.updates import Update
from tests.simulation.command_line import command_line
from tests.simulation.oracles import Tracked
from tests.simulation.pair import Arrival, Half, HalfOracles, Pair, PairOutcome, random_pair_of
from tests.simulation.pair_liveness import PairLiveness
from tests.simulation.pictures import Album, PictureLiveness, PictureOracles, Showing
from tests.simulation.simulator import scaled_down
from tests.simulation.workload import Conversations, Traffic

MISLED: Final = 0.05  # of prompts have another picture on decode
REFUSED: Final = {"RequestTooLarge": "picture_capacity_exceeded", "Overloaded": "pictures_full"}


@dataclass(frozen=True, kw_only=True)
class ShowingPairOutcome(PairOutcome):
    """`shown` halves with pictures were admitted; `moved` prompts with some came over; `encoded` tiles on decode.
    `misled` requests ended because their pictures differ."""

    shown: int = 0
    moved: int = 0
    encoded: int = 0
    misled: int = 0


class ShownPrompt(list[int]):
    """A prompt with its pictures."""

    def __init__(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> None:
        super().__init__(tokens)
        self.pictures = pictures

    def misled(self) -> ShownPrompt:
        """Return the same prompt, whose first picture has other pixels."""
        first, *others = self.pictures
        pixels = bytes([first.pixels[0] ^ 1, *first.pixels[1:]])
        return ShownPrompt(self, [replace(first, pixels=pixels, digest=first.digest[::-1]), *others])


class WithAlbum(Conversations):
    """Conversations in which most prompts have pictures."""

    def __init__(self, rng: Random, traffic: Traffic, capacity: int, album: Album, dice: Random) -> None:
        super().__init__(rng, traffic, capacity)
        self._album, self._dice = album, dice

    def prompt(self, max_tokens: int) -> list[int]:
        if self._dice.random() < 0.2:
            return super().prompt(max_tokens)
        drawn = self._album.prompt(max(1, self._capacity - max_tokens))
        return ShownPrompt(drawn.tokens, drawn.pictures)


class ShowingLiveness(PictureLiveness, PairLiveness):
    pass


class ShowingOracles(PictureOracles, HalfOracles):
    make_liveness: ClassVar[type[ShowingLiveness]] = ShowingLiveness


class ShowingHalf(Showing, Half):
    make_oracles: ClassVar[type[ShowingOracles]] = ShowingOracles
    runner: Any

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.restarts, self.num_moved, self.num_misled = 0.0, 0, 0

    def seed_of(self, config: SchedulerConfig, traffic: Traffic) -> str:
        """Both engines have the same encoder."""
        return str(traffic)

    def _pictures(self, prompt: Sequence[int]) -> Sequence[Picture]:
        return prompt.pictures if isinstance(prompt, ShownPrompt) else ()

    def _no_room_for(self, req: Any, pictures: Sequence[Picture]) -> str:
        kind = super()._no_room_for(req, pictures)
        return REFUSED[kind] if kind else ""

    def meet(
        self, prompt: Sequence[int], params: SamplingParams, namespace: str, priority: int, where: Rendezvous | None
    ) -> Tracked | None:
        pictures = self._pictures(prompt)
        self.pictures[self.num_added + 1] = pictures
        found: Tracked | None = self.noted(super().meet(prompt, params, namespace, priority, where), pictures)
        return found

    def _heard(self, updates: list[Update]) -> None:
        self.num_misled += [update.failure.code for update in updates if update.failure].count("images_differ")
        super()._heard(updates)

    def arrived(self, room: int, tail: Tail) -> None:
        super().arrived(room, tail)
        self.num_moved += bool(self.pictures.get(self.rooms[room]))

    def calm(self) -> None:
        super().calm()
        self.runner.breaks = 0.0

    def check_drained(self) -> None:
        super().check_drained()
        self.check_rest()


class ShowingPair(Pair[ShowingHalf]):
    def __init__(self, prefill: ShowingHalf, decode: ShowingHalf, rng: Random, traffic: Traffic, *others: Any) -> None:
        super().__init__(prefill, decode, rng, traffic, *others)
        half, capacity = self.prefill, min(each.capacity for each in (prefill, decode))
        self.conversations = WithAlbum(rng, traffic, capacity, half.album, half.dice)
        for each in (prefill, decode):
            each.conversations = self.conversations

    def _meet(self, arrival: Arrival) -> None:
        prompt = arrival.prompt
        may_mislead = arrival.where is not None and arrival.half is self.decode
        if may_mislead and isinstance(prompt, ShownPrompt) and prompt.pictures:
            prompt = prompt.misled() if self.decode.dice.random() < MISLED else prompt
        super()._meet(with_values(arrival, prompt=prompt))

    def _limit(self) -> int:
        """Each layer of each tile may be a step of its own, as often as a request may be set back."""
        return super()._limit() + sum(half.tile_steps() for half in (self.prefill, self.decode))

    def run(self) -> ShowingPairOutcome:
        done, halves = super().run(), (self.prefill, self.decode)
        return ShowingPairOutcome(
            **vars(done),
            shown=sum(half.num_shown for half in halves),
            moved=self.decode.num_moved,
            misled=sum(half.num_misled for half in halves),
            encoded=int(self.decode.encoder.known.counters["encoded_tiles"]),
        )


def random_showing_pair(seed: int) -> ShowingPair:
    """Return the two engines of a seed."""
    return random_pair_of(seed, ShowingPair, ShowingHalf)


def run_seed(seed: int) -> ShowingPairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down():
            return random_showing_pair(seed).run()
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.showing_pair --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.showing_pair", __doc__ or "", run_seed, ShowingPairOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
