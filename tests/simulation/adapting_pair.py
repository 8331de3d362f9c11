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
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from forebay.config.engine_config import SchedulerConfig
from forebay.engine.frames import AddRequest, LoadAdapter, UnloadAdapter
from forebay.memory.adapters import AdapterLoad
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous, Tail
from forebay.requests.updates import Update
from tests.simulation.adapting import NAMES, PATHS, Adapting, Forgetting
from tests.simulation.command_line import command_line
from tests.simulation.liveness import require
from tests.simulation.oracles import Tracked
from tests.simulation.pair import Half, HalfOracles, Pair, random_pair_of
from tests.simulation.simulator import scaled_down
from tests.simulation.sleeping_pair import SleepingHalf, SleepingPair, SleepingPairOutcome
from tests.simulation.workload import Traffic

MIRRORED: Final = 0.8  # of loads and unloads happen on both engines
MISLED: Final = 0.03  # of halves name another adapter than their peers


@dataclass(frozen=True, kw_only=True)
class AdaptingPairOutcome(SleepingPairOutcome):
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


class AdaptingHalf(Adapting, Half):
    """A half with adapters: both halves of a request name the same one, if that is loaded there. `Names` sets
    `name_of` and `mirror`."""

    make_oracles: ClassVar[type[AdaptedOracles]] = AdaptedOracles
    oracles: AdaptedOracles
    name_of: Callable[[int, Sequence[int]], str]
    mirror: Callable[[LoadAdapter | UnloadAdapter], None]

    def __init__(self, config: SchedulerConfig, traffic: Traffic, rng: Random, *args: Any, **others: Any) -> None:
        super().__init__(config, traffic, rng, *args, **others)
        self.next: AdapterLoad | None = None
        self.oracles.digests = {}
        self.num_unknown = self.num_mismatched = self.num_moved = 0

    def _adapter(self) -> AdapterLoad | None:
        return self.next

    def meet(
        self, prompt: Sequence[int], params: SamplingParams, namespace: str, priority: int, where: Rendezvous | None
    ) -> Tracked | None:
        name = self.name_of(where.room if where else 0, prompt)
        self.next = next((adapter for adapter in self.registry.accepting if adapter.name == name), None)
        if name and self.next is None:
            self._refuse(name, prompt, params, where)
            return None
        if self.next:
            self.oracles.digests[str(self.next.number)] = self.next.digest
        tracked = super().meet(prompt, params, namespace, priority, where)
        self.note_adapter()
        return tracked

    def _refuse(self, name: str, prompt: Sequence[int], params: SamplingParams, where: Rendezvous | None) -> None:
        self.num_added += 1
        self.num_refused += 1
        self.num_unknown += 1
        wanted = AddRequest(
            request_id=self.num_added, prompt_token_ids=list(prompt), params=params, rendezvous=where, adapter=name
        )
        (told,) = self.core.add(wanted)
        is_replaced = name in {adapter.name for adapter in self.registry}
        right = "adapter_loading" if is_replaced else "model_not_found"
        require(told.failure is not None and told.failure.code == right, f"{name} was not refused: {told}")

    def _heard(self, updates: list[Update]) -> None:
        codes = [update.failure.code for update in updates if update.failure]
        self.num_mismatched += codes.count("adapter_mismatch")
        super()._heard(updates)

    def arrived(self, room: int, tail: Tail) -> None:
        super().arrived(room, tail)
        self.num_moved += self.rooms[room] in self.runner.wanted

    def ask_for(self, frame: LoadAdapter | UnloadAdapter) -> None:
        super().ask_for(frame)
        if self.dice.random() < MIRRORED:
            self.mirror(frame)

    def hear_of(self, frame: LoadAdapter | UnloadAdapter) -> None:
        """Do what the other engine was asked for, too."""
        self.num_frames += 1
        super().ask_for(replace(frame, serial=self.num_frames))

    def calm(self) -> None:
        super().calm()
        self.ask_no_more()

    def check_drained(self) -> None:
        super().check_drained()
        self.check_empty()


class AdaptingSleepingHalf(Forgetting, AdaptingHalf, SleepingHalf):
    pass


class Names:
    """The adapters that the requests of a pair name."""

    def __init__(self, prefill: AdaptingHalf, decode: AdaptingHalf) -> None:
        self._prefill, self._decode = prefill, decode
        self._dice = Random(str(prefill.config))
        self._names: dict[tuple[int, tuple[int, ...]], str] = {}
        for half, other in ((prefill, decode), (decode, prefill)):
            half.name_of, half.mirror = self._name_of, other.hear_of

    def load_first(self) -> None:
        """Load most adapters before the first request."""
        prefill = self._prefill
        for name in NAMES[: prefill.config.max_loras]:
            prefill.num_frames += 1
            path = self._dice.choice(PATHS)
            prefill.ask_for(LoadAdapter(serial=prefill.num_frames, name=name, path=path, replace=False))
        for half in (prefill, self._decode):
            while half.later:
                half.later.pop()()
            half.loader.advance()

    def _name_of(self, room: int, prompt: Sequence[int]) -> str:
        key = room, tuple(prompt)
        if key not in self._names or not room or self._dice.random() < MISLED:
            self._names[key] = self._dice.choice(self._loaded()) if self._dice.random() < 0.8 else ""
        return self._names[key]

    def _loaded(self) -> list[str]:
        """Names that both engines have, if there are some: anything else ends at once."""
        prefill, decode = (
            {adapter.name for adapter in half.registry.accepting} for half in (self._prefill, self._decode)
        )
        return sorted(prefill & decode) or [*NAMES, *[""] * len(NAMES)]


def run_seed(seed: int) -> AdaptingPairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down():
            return _outcome(random_adapting_pair(seed))
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.adapting_pair --seed {seed}")
        raise


def random_adapting_pair(seed: int) -> Pair[AdaptingHalf]:
    """Return the two engines of a seed, which sleep if it is odd."""
    if seed % 2 == 0:
        pair = random_pair_of(seed, Pair[AdaptingHalf], AdaptingHalf)
        pair.beginnings.append(Names(pair.prefill, pair.decode).load_first)
        return pair
    asleep = random_pair_of(seed, SleepingPair[AdaptingSleepingHalf], AdaptingSleepingHalf)
    asleep.beginnings.append(Names(asleep.prefill, asleep.decode).load_first)
    asleep.sleeps(Random(f"{seed} sleeps"))
    return asleep


def _outcome(pair: Pair[AdaptingHalf]) -> AdaptingPairOutcome:
    done, halves = pair.run(), (pair.prefill, pair.decode)
    return AdaptingPairOutcome(
        **vars(done),
        loads=sum(half.counts["loads"] for half in halves),
        unloads=sum(half.counts["unloads"] for half in halves),
        lost=sum(half.counts["lost"] for half in halves),
        adapted=sum(half.num_adapted for half in halves),
        moved=pair.decode.num_moved,
        unknown=sum(half.num_unknown for half in halves),
        mismatched=sum(half.num_mismatched for half in halves),
    )


def run_seeds(seeds: range) -> AdaptingPairOutcome:
    return sum(map(run_seed, seeds), AdaptingPairOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.adapting_pair", __doc__ or "", run_seed, AdaptingPairOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
