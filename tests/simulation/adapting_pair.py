"""The simulators of two engines with adapters that come and go on either: by turns one that sleeps, and one that does
not.

python -m tests.simulation.adapting_pair --seed 1234              replay one seed
python -m tests.simulation.adapting_pair --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from msgspec.structs import replace

from forebay.engine.frames import AddRequest, LoadAdapter, UnloadAdapter
from forebay.memory.adapters import AdapterLoad
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous, Tail
from forebay.requests.updates import Update
from tests.simulation.adapting import NAMES, PATHS, Adapting, Forgetting
from tests.simulation.command_line import command_line
from tests.simulation.liveness import require
from tests.simulation.oracles import Tracked
from tests.simulation.pair import Half, HalfOracles, Pair, PairOutcome, random_pair
from tests.simulation.simulator import scaled_down
from tests.simulation.sleeping_pair import SleepingHalf, SleepingPair

MIRRORED: Final = 0.8  # of loads and unloads happen on both engines
MISLED: Final = 0.03  # of halves name another adapter than their peers


@dataclass(frozen=True, kw_only=True)
class AdaptingPairOutcome(PairOutcome):
    """`adapted` halves with an adapter were admitted, `unknown` refused; `mismatched` ended because the peers' adapters
    differ, `lost` because the adapter was gone after a sleep. `moved` halves came over with an adapter."""

    loads: int = 0
    unloads: int = 0
    adapted: int = 0
    moved: int = 0
    unknown: int = 0
    mismatched: int = 0
    lost: int = 0


class AdaptedOracles(HalfOracles):
    """The hash model's tokens depend on what an adapter adds, and not on its number, which each engine gives alone."""

    digests: dict[str, str]  # by number

    def salt(self, namespace: str) -> int:
        version, _, inner = namespace.partition("/")
        weights, plus, number = version.partition("+")
        return super().salt(f"{weights}{plus}{self.digests[number] if plus else ''}/{inner}")


class Meeting:
    """Mixed into a half with adapters: both halves of a request name the same one, if that is loaded there."""

    make_oracles = AdaptedOracles
    name_of: Callable[[int, Sequence[int]], str]
    mirror: Callable[[Any], None]

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.next: AdapterLoad | None = None
        self.oracles.digests = {}  # type: ignore[attr-defined]
        self.num_unknown = self.num_mismatched = self.num_moved = 0

    def _adapter(self) -> AdapterLoad | None:
        return self.next

    def meet(
        self, prompt: Sequence[int], params: SamplingParams, namespace: str, priority: int, where: Rendezvous | None
    ) -> Tracked | None:
        name = self.name_of(where.room if where else 0, prompt)
        self.next = next((adapter for adapter in self.registry.accepting if adapter.name == name), None)  # type: ignore[attr-defined]
        if name and self.next is None:
            return self._refuse(name, prompt, params, where)
        if self.next:
            self.oracles.digests[str(self.next.number)] = self.next.digest  # type: ignore[attr-defined]
        tracked = super().meet(prompt, params, namespace, priority, where)  # type: ignore[misc]
        req: Request | None = self.scheduler.requests.get(self.num_added)  # type: ignore[attr-defined]
        if req is not None and req.adapter is not None:
            self.runner.wanted[req.id] = req.adapter.digest  # type: ignore[attr-defined]
            self.num_adapted += 1
        found: Tracked | None = tracked
        return found

    def _refuse(self, name: str, prompt: Sequence[int], params: SamplingParams, where: Rendezvous | None) -> None:
        self.num_added += 1
        self.num_refused += 1
        self.num_unknown += 1
        wanted = AddRequest(
            request_id=self.num_added, prompt_token_ids=list(prompt), params=params, rendezvous=where, adapter=name
        )
        (told,) = self.core.add(wanted)  # type: ignore[attr-defined]
        is_replaced = name in {adapter.name for adapter in self.registry}  # type: ignore[attr-defined]
        right = "adapter_loading" if is_replaced else "model_not_found"
        require(told.failure is not None and told.failure.code == right, f"{name} was not refused: {told}")

    def _heard(self, updates: list[Update]) -> None:
        codes = [update.failure.code for update in updates if update.failure]
        self.num_mismatched += codes.count("adapter_mismatch")
        super()._heard(updates)  # type: ignore[misc]

    def arrived(self, room: int, tail: Tail) -> None:
        super().arrived(room, tail)  # type: ignore[misc]
        self.num_moved += self.rooms[room] in self.runner.wanted  # type: ignore[attr-defined]

    def ask_for(self, frame: LoadAdapter | UnloadAdapter) -> None:
        super().ask_for(frame)  # type: ignore[misc]
        if self.dice.random() < MIRRORED:  # type: ignore[attr-defined]
            self.mirror(frame)

    def hear_of(self, frame: LoadAdapter | UnloadAdapter) -> None:
        """Do what the other engine was asked for, too."""
        self.num_frames += 1
        Adapting.ask_for(self, replace(frame, serial=self.num_frames))  # type: ignore[arg-type]


class AdaptingHalf(Meeting, Adapting, Half):
    pass


class AdaptingSleepingHalf(Meeting, Forgetting, SleepingHalf):
    pass


class WithAdapters:
    """Mixed into a pair."""

    prefill: Any
    decode: Any

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.dice = Random(str(self.prefill.config))
        self.names: dict[tuple[int, tuple[int, ...]], str] = {}
        for half, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            half.name_of, half.mirror = self._name_of, other.hear_of

    def _begin(self) -> None:
        """Most adapters are there before the first request."""
        for name in NAMES[: self.prefill.config.max_loras]:
            self.prefill.num_frames += 1
            frame = LoadAdapter(serial=self.prefill.num_frames, name=name, path=self.dice.choice(PATHS), replace=False)
            self.prefill.ask_for(frame)
        for half in (self.prefill, self.decode):
            while half.later:
                half.later.pop()()
            half.loader.advance()

    def _name_of(self, room: int, prompt: Sequence[int]) -> str:
        key = room, tuple(prompt)
        if key not in self.names or not room or self.dice.random() < MISLED:
            self.names[key] = self.dice.choice(self._loaded()) if self.dice.random() < 0.8 else ""
        return self.names[key]

    def _loaded(self) -> list[str]:
        """Names that both engines have, if there are some: anything else ends at once."""
        prefill, decode = (
            {adapter.name for adapter in half.registry.accepting} for half in (self.prefill, self.decode)
        )
        return sorted(prefill & decode) or [*NAMES, *[""] * len(NAMES)]

    def drain(self) -> None:
        for half in (self.prefill, self.decode):
            half.ask_no_more()
        super().drain()  # type: ignore[misc]
        for half in (self.prefill, self.decode):
            half.check_empty()

    def run(self) -> AdaptingPairOutcome:
        self._begin()
        done, halves = super().run(), (self.prefill, self.decode)  # type: ignore[misc]
        kept = {name: value for name, value in vars(done).items() if name in PairOutcome.__dataclass_fields__}
        return AdaptingPairOutcome(
            **kept,
            loads=sum(half.counts["loads"] for half in halves),
            unloads=sum(half.counts["unloads"] for half in halves),
            lost=sum(half.counts["lost"] for half in halves),
            adapted=sum(half.num_adapted for half in halves),
            moved=self.decode.num_moved,
            unknown=sum(half.num_unknown for half in halves),
            mismatched=sum(half.num_mismatched for half in halves),
        )


class AdaptingPair(WithAdapters, Pair):
    pass


class AdaptingSleepingPair(WithAdapters, SleepingPair):
    pass


def run_seed(seed: int) -> AdaptingPairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down():
            outcome: AdaptingPairOutcome = random_adapting_pair(seed).run()
            return outcome
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.adapting_pair --seed {seed}")
        raise


def random_adapting_pair(seed: int) -> Any:
    """Return the two engines of a seed, which sleep if it is odd."""
    if seed % 2 == 0:
        return random_pair(seed, AdaptingPair, AdaptingHalf)
    asleep: Any = random_pair(seed, AdaptingSleepingPair, AdaptingSleepingHalf)
    asleep.sleeps(Random(f"{seed} sleeps"))
    return asleep


def run_seeds(seeds: range) -> AdaptingPairOutcome:
    return sum(map(run_seed, seeds), AdaptingPairOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.adapting_pair", __doc__ or "", run_seed, AdaptingPairOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
