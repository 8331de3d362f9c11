"""The simulators with pictures in prompts: by turns one engine, and one that sleeps.

A slice of the encoder's work hashes pixels, or what the slice before it left; a token at a picture's place hashes the
row that the plan names. With M-RoPE every token at a full or windowed layer hashes its three rotary positions, too:
those of the plan, or its position and the delta of its row. The expected tokens are computed from the request alone.

python -m tests.simulation.pictures --seed 1234              replay one seed
python -m tests.simulation.pictures --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from math import ceil
from random import Random
from typing import Any, ClassVar, Final, Self
from unittest.mock import patch

import numpy as np

from forebay.base.parts import I32, I64
from forebay.base.pixels import Size, num_pixel_bytes, num_tokens
from forebay.config.engine_config import SchedulerConfig
from forebay.config.pictures import PictureConfig
from forebay.engine.frames import KV_CACHE
from forebay.memory import pictures as memory
from forebay.memory.kinds.window.demand import window_pages_in_flight
from forebay.memory.pictures import Pictures
from forebay.memory.slots import PAD
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.step_plan import Encode, StepPlan, StepResult
from forebay.scheduler import admission, encoding
from forebay.scheduler.scheduler import Scheduler
from tests.kinds_of import num_states, num_window_pages, resized
from tests.pictures import EDGE, SIZE, TILE_BYTES, TOKENS, picture
from tests.simulation.command_line import command_line
from tests.simulation.device_memory import POISON, RunnerError
from tests.simulation.faulty_device import CopyStep
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import HashStep
from tests.simulation.hashing import MAX_VOCAB, NO_ROWS, U64, Rows, mix, row_key, row_state_key, turns_of
from tests.simulation.liveness import Liveness, require
from tests.simulation.oracles import Oracles
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import SHARED, Simulation, scaled_down
from tests.simulation.sleeping import SleepingSimulation
from tests.simulation.workload import Traffic, random_config, random_traffic, with_speculation, with_tiers

PADDING: Final = 0x0BAD_0BAD  # in row 0 of the encodings
NOT_FINITE: Final = 0x0FA1_0FA1
MARK: Final = 1  # a token between tiles
SQUARE: Final = (2 * EDGE, 2 * EDGE)
SIZES: Final = (SIZE, SIZE, (EDGE, EDGE), SQUARE, (3 * EDGE, EDGE))
LONGEST_RUN: Final = 3 * 4  # tokens of three tiles
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class PictureOutcome:
    """Sums over seeds: requests with pictures, those refused for them, hits, tiles, slices and what was dropped; and
    tokens behind pictures, which M-RoPE rotates by less than their positions (`turned`)."""

    seeds: int = 1
    steps: int = 0
    shown: int = 0
    refused: int = 0
    hits: int = 0
    cached: int = 0
    tiles: int = 0
    slices: int = 0
    alone: int = 0
    evicted: int = 0
    drops: int = 0
    restarts: int = 0
    spans: int = 0
    turned: int = 0
    digest: str = ""

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        both = f"{self.digest}{other.digest}"
        return type(self)(**sums, digest=hashlib.sha256(both.encode()).hexdigest()[:8])


# -- the encoder's arithmetic ------------------------------------------------------------------------------------------


def begin(pixels: bytes, size: Size, version: int) -> int:
    return mix(int.from_bytes(hashlib.sha256(pixels + bytes([*size, version % 256])).digest()[:8], "little"))


def layer(state: int, number: int) -> int:
    return mix((state * 0x2545F4914F6CDD1D + number + 1) & _MASK)


def finish(state: int, num_tokens: int) -> list[int]:
    return [mix((state + at) & _MASK) for at in range(num_tokens)]


def rows_of_tile(pixels: bytes, size: Size, version: int, num_layers: int) -> list[int]:
    state = begin(pixels, size, version)
    for number in range(num_layers):
        state = layer(state, number)
    return finish(state, num_tokens(size, EDGE))


class Encoder:
    """The device's rows of encodings, and what it has begun: by picture and tile the layers done and the state."""

    def __init__(self, config: PictureConfig, known: Pictures) -> None:
        self.config, self.known = config, known
        self.rows: U64 = np.full(config.num_rows + 1, POISON, dtype=np.uint64)
        self.rows[PAD] = PADDING
        self.begun: dict[tuple[int, int], tuple[int, int]] = {}
        self.version = 0  # of the weights
        self.num_slices = self.num_drops = 0

    def check(self, plan: StepPlan) -> None:
        """At its launch: what it writes is held by its pictures, and nothing is in row 0."""
        taken = plan.pictures.picture_rows
        written = [encode.rows for encode in plan.pictures.encodes]
        for rows in (taken, *written):
            if len(rows) and (rows.min() <= PAD or rows.max() > self.config.num_rows):
                raise RunnerError(f"step {plan.step} has rows of encodings outside 1..{self.config.num_rows}: {rows}")
        for encode in plan.pictures.encodes:
            owners = set(self.known.rows.slots.owner[(encode.rows - 1) // self.config.block_rows + 1].tolist())
            if owners - {encode.picture}:
                raise RunnerError(f"step {plan.step} writes rows {encode.rows} of {owners} for {encode.picture}")
        if len(plan.pictures.picture_tokens) != len(taken):
            raise RunnerError(f"step {plan.step} has rows for other tokens")

    def forget(self, plan: StepPlan) -> None:
        for number in plan.pictures.drops:
            self.num_drops += 1
            for key in [key for key in self.begun if key[0] == number]:
                del self.begun[key]

    def run(self, plan: StepPlan, broken: bool) -> None:
        """Do the slices; with `broken` the last result is not finite."""
        for encode in plan.pictures.encodes:
            self.num_slices += 1
            self._slice(encode, broken)

    def _slice(self, encode: Encode, broken: bool) -> None:
        key = encode.picture, encode.tile
        if bool(encode.pixels) != (encode.first_layer == 0):
            raise RunnerError(f"{encode} begins without pixels, or goes on with them")
        if encode.first_layer == 0:
            if key in self.begun:
                raise RunnerError(f"{encode} begins what was begun and not dropped: {self.begun[key]}")
            if len(encode.pixels) != num_pixel_bytes([(encode.height, encode.width)]):
                raise RunnerError(f"{encode} begins with other pixels than its own")
            done, state = 0, begin(encode.pixels, (encode.height, encode.width), self.version)
        else:
            done, state = self.begun.pop(key, (-1, 0))
        if done != encode.first_layer or not encode.first_layer < encode.last_layer <= self.config.num_layers:
            raise RunnerError(f"{encode} follows {done} layers")
        for number in range(encode.first_layer, encode.last_layer):
            state = layer(state, number)
        ends = encode.last_layer == self.config.num_layers
        count = num_tokens((encode.height, encode.width), EDGE)
        if len(encode.rows) != (count if ends else 0):
            raise RunnerError(f"{encode} writes rows {encode.rows}")
        if ends:
            self.rows[encode.rows] = NOT_FINITE if broken else finish(state, count)
        else:
            self.begun[key] = encode.last_layer, state

    def fail(self, plan: StepPlan) -> None:
        """The step stops somewhere: what it was to write holds anything, and what it was to go on with is gone."""
        for encode in plan.pictures.encodes:
            self.rows[encode.rows] = POISON
            self.begun[encode.picture, encode.tile] = -1, 0

    def reset(self) -> None:
        self.rows[PAD + 1 :] = POISON
        self.begun.clear()


class PictureRunner(HashRunner):
    """A hash runner with an encoder: tokens at pictures' places take rows, and no others do."""

    encoder: Encoder
    rows: dict[int, Rows]  # by request
    runs: dict[int, list[tuple[int, int]]]  # of pictures' tokens, by request
    breaks: float = 0.0  # chance that an encoding is not finite
    dice: Random
    num_spans: int = 0
    deltas: I64  # by row: what M-RoPE adds to the positions of tokens that have none in the plan
    num_turned: int = 0

    def launch(self, plan: StepPlan) -> HashStep:
        self.encoder.check(plan)
        return super().launch(plan)

    def forget_pictures(self, plan: StepPlan) -> None:
        self.encoder.forget(plan)

    def _rows_of(self, tenant: int) -> Rows:
        return self.rows.get(tenant, NO_ROWS)

    def _settle(self, plan: StepPlan) -> None:
        super()._settle(plan)
        for its in plan.admissions:
            self.deltas[its.row] = its.rope_delta

    def _forward(self, step: HashStep, poisoned: Mapping[int, int]) -> StepResult:
        plan = step.plan
        self.encoder.forget(plan)
        self.encoder.run(plan, broken=self.dice.random() < self.breaks)
        taken = self._taken(plan)
        if (taken == POISON).any() or (taken == PADDING).any():
            raise RunnerError(f"step {plan.step} reads rows {plan.pictures.picture_rows}, where no encoding is")
        if self.encoder.rows[PAD] != PADDING:
            raise RunnerError("row 0 of the encodings was written")
        self._check_places(step)
        self._check_spans(step)
        bad = plan.pictures.picture_tokens[taken == NOT_FINITE]
        gone = {int(i): 0 for i in step.which[bad]}
        return super()._forward(step, {**poisoned, **gone})

    def _check_places(self, step: HashStep) -> None:
        """All of a chunk's tokens of pictures take rows, and no others."""
        plan, right = step.plan, []
        for i in range(plan.num_extends):
            rows, start, first = self._rows_of(int(step.tenants[i])), int(plan.starts[i]), int(step.firsts[i])
            right += [first + at for at in range(int(plan.q_lens[i])) if start + at in rows]
        if plan.pictures.picture_tokens.tolist() != right:
            raise RunnerError(f"step {plan.step}: tokens {plan.pictures.picture_tokens} take rows, not {right}")

    def _check_spans(self, step: HashStep) -> None:
        """No chunk cuts a run of a picture's tokens at its end, and the plan has what of them it computes."""
        plan, right = step.plan, []
        for i in range(plan.num_extends if self.encoder.config.longest_span else 0):
            start, stop, first = int(plan.starts[i]), int(plan.ends[i]), int(step.firsts[i])
            for run, length in self.runs.get(int(step.tenants[i]), ()):
                if start < run + length and run < stop:
                    if stop < run + length:
                        raise RunnerError(f"step {plan.step} cuts the run of {length} tokens from {run} at {stop}")
                    begin = max(run, start)
                    right.append((first + begin - start, run + length - begin))
        spans = list(zip(plan.pictures.span_starts.tolist(), plan.pictures.span_lens.tolist(), strict=True))
        if spans != right:
            raise RunnerError(f"step {plan.step} has the spans {spans}, not {right}")
        self.num_spans += len(spans)

    def _taken(self, plan: StepPlan) -> U64:
        return self.encoder.rows[plan.pictures.picture_rows]

    def _keys(self, step: HashStep, tokens: I64) -> U64:
        keys = super()._keys(step, tokens)
        keys[step.plan.pictures.picture_tokens] = [row_key(row) for row in self._taken(step.plan).tolist()]
        offsets = self._offsets(step)
        self.num_turned += int((offsets < 0).all(axis=0).sum())
        return keys * turns_of(offsets)

    def _offsets(self, step: HashStep) -> I64:
        """By how much more than its position each token is rotated, [3, T]."""
        plan = step.plan
        offsets = np.tile(self.deltas[plan.rows][step.which], (3, 1))
        if len(given := plan.pictures.rope_positions):
            num_given = len(plan.input_ids)
            offsets[:, :num_given] = given.reshape(3, -1) - (step.starts[step.which] + step.inside)[:num_given]
        if offsets.any() and not self.encoder.config.mrope:
            raise RunnerError(f"step {plan.step} has rotary positions for a model with one")
        return offsets

    def _state_keys(self, step: HashStep, tokens: I64) -> U64:
        keys = super()._state_keys(step, tokens)
        keys[step.plan.pictures.picture_tokens] = [row_state_key(row) for row in self._taken(step.plan).tolist()]
        return keys

    def _fail(self, step: HashStep) -> None:
        self.encoder.forget(step.plan)
        self.encoder.fail(step.plan)
        super()._fail(step)


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A picture in a prompt. With a `gap` a token stands between its tiles, or within each."""

    seed: int
    sizes: tuple[Size, ...]
    gap: int = 0
    grid: tuple[int, int] = (1, 1)

    @property
    def tokens(self) -> list[bool]:
        """Which of its tokens in the prompt stand for rows."""
        flags: list[bool] = []
        for size in self.sizes:
            each = [True] * num_tokens(size, EDGE)
            if self.gap == 1:
                each = [*each, False]
            elif self.gap == 2:
                each = [each[0], False, *each[1:]]
            flags += each
        return flags


Part = list[int] | Drawn | tuple[Drawn, Drawn]
"""Text, a picture, or two whose tokens take turns."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    pictures: list[Picture]


def prompt_of(parts: Sequence[Part], placeholder: int) -> Prompt:
    tokens: list[int] = []
    places: list[tuple[Drawn, list[int]]] = []
    for part in parts:
        match part:
            case list():
                tokens += part
            case Drawn():
                flags = part.tokens
                places.append((part, [len(tokens) + at for at, is_row in enumerate(flags) if is_row]))
                tokens += [placeholder if is_row else MARK for is_row in flags]
            case (one, two):
                both: list[list[int]] = [[] for _ in part]
                counts = [sum(drawn.tokens) for drawn in (one, two)]
                for at in range(max(counts)):
                    for own, count in zip(both, counts, strict=True):
                        if at < count:
                            own.append(len(tokens))
                            tokens.append(placeholder)
                places += zip(part, both, strict=True)
    pictures = [picture(drawn.seed, sizes=drawn.sizes, grid=drawn.grid, runs=runs_of(own)) for drawn, own in places]
    return Prompt(tokens, pictures)


def runs_of(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    runs: list[list[int]] = []
    for at in positions:
        if runs and sum(runs[-1]) == at:
            runs[-1][1] += 1
        else:
            runs.append([at, 1])
    return tuple((start, length) for start, length in runs)


class Album:
    """Makes prompts with pictures, which often begin like earlier ones, or like them but for a picture."""

    def __init__(self, dice: Random, config: PictureConfig, longest: int) -> None:
        self._dice, self._config, self._longest = dice, config, max(longest, TOKENS + 1)
        self._past: list[list[Part]] = []
        self._seeds = dice.choice([2, 5, 40])

    def _drawn(self) -> Drawn:
        dice = self._dice
        sizes = tuple(dice.choice(SIZES) for _ in range(dice.choice([1, 1, 2, 3])))
        if self._config.mrope:  # one run of tokens, in any grid of as many; of a line's the delta would be 0
            sizes = dice.choice([(SQUARE,), (SQUARE,), (SIZE, SIZE), sizes])
            count = tokens_of(sizes)
            sides = [rows for rows in range(1, count + 1) if count % rows == 0]
            rows = dice.choice(sides[1:-1] or sides) if dice.random() < 0.7 else dice.choice(sides)
            return Drawn(dice.randrange(self._seeds), sizes, grid=(rows, count // rows))
        return Drawn(dice.randrange(self._seeds), sizes, dice.choice([0, 0, 1, 2]))

    def _part(self) -> Part:
        dice, kind = self._dice, self._dice.random()
        if kind < 0.45:
            return [dice.randrange(2, self._config.vocab_size) for _ in range(dice.randint(1, 8))]
        return (self._drawn(), self._drawn()) if kind < 0.55 and not self._config.mrope else self._drawn()

    def prompt(self, most: int) -> Prompt:
        """A prompt of at most `most` tokens, unless its first part is longer."""
        dice = self._dice
        parts: list[Part] = []
        if self._past and dice.random() < 0.7:
            parts = list(dice.choice(self._past))
            if dice.random() < 0.5:
                parts = parts[: dice.randint(0, len(parts))]
            elif dice.random() < 0.5:
                parts = [self._other(part) for part in parts]
        for _ in range(dice.randint(0 if parts else 1, 4)):
            parts.append(self._part())
        if self._config.mrope and dice.random() < 0.5:
            parts += [self._drawn(), [dice.randrange(2, self._config.vocab_size)], self._drawn()]
        while len(parts) > 1 and len(prompt_of(parts, 0).tokens) > min(most, self._longest):
            parts.pop()
        if isinstance(parts[0], list):
            parts[0] = parts[0][: max(1, most)]
        self._past.append(parts)
        if len(self._past) > 10:
            self._past.pop(dice.randrange(len(self._past)))
        return prompt_of(parts, self._config.placeholder)

    def _other(self, part: Part) -> Part:
        """The same placeholders of another picture."""
        return replace(part, seed=self._dice.randrange(self._seeds)) if isinstance(part, Drawn) else part


# -- the simulation ----------------------------------------------------------------------------------------------------


class PictureLiveness(Liveness):
    """A request may wait for a picture, which is progress; and slices count as tokens of prompts."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        super().__init__(config, scheduler)
        self._encoded: set[int] = set()  # numbers of the pictures that the last plan encodes
        self._encoded_for: dict[int, list[int]] = {}  # requests, by step

    def planned(self, plan: StepPlan | None, now: float) -> None:
        self._encoded = {encode.picture for encode in plan.pictures.encodes} if plan else set()
        if plan and self._encoded:
            self._encoded_for[plan.step] = [req.id for req in self._scheduler.queues.flights[-1].encoded_for]
        super().planned(plan, now)

    def computed(self, plan: StepPlan, step: HashStep | CopyStep, now: float) -> None:
        super().computed(plan, step, now)
        for request_id in self._encoded_for.get(plan.step, ()):
            if request_id in self._times:
                self._times[request_id].progress = now

    def _may_wait(self, req: Request, under_way: list[Request]) -> bool:
        if req.pictures is not None and self._encoded & {its.number for its in req.pictures.encodings}:
            return True
        return self._may_wait_for_rows(req) or super()._may_wait(req, under_way)

    def _may_wait_for_rows(self, req: Request) -> bool:
        """Whether another request of the tenant is encoded first, or prompts under way leave too few rows."""
        scheduler = self._scheduler
        if req.pictures is None:
            return False
        encoding, flights = scheduler.queues.encoding, scheduler.queues.flights
        if encoding.get(req.account, req) is not req:
            return True
        chunks = flights[-1].chunks if flights else ()
        others = {*scheduler.queues.extending, *encoding.values(), *(chunk.req for chunk in chunks)} - {req}
        if any(other.pictures and other.account is req.account for other in others):
            return True  # it may have been encoded first until it started
        in_use = {its for other in others if other.pictures for its in other.pictures.encodings}
        assert scheduler.pools.pictures is not None
        rows = scheduler.pools.pictures.rows
        blocks = {its: rows.num_blocks(its.num_tokens) for its in {*in_use, *req.pictures.encodings}}
        return sum(blocks.values()) > rows.slots.capacity

    def _budget_left(self, plan: StepPlan | None, started: list[Request]) -> int:
        left, config = super()._budget_left(plan, started), self._config.pictures
        assert config is not None
        for encode in plan.pictures.encodes if plan else ():
            layers = range(encode.first_layer, encode.last_layer)
            left -= ceil(config.layer_tokens((encode.height, encode.width), layers))
        # A run that must not be cut may wait for more than is left, and nobody starts before it.
        shown = (req for req in self._scheduler.requests.values() if req.pictures is not None)
        cost = admission.SCORED_COST if any(req.wants_prompt_logprobs for req in shown) else 1
        return left - max(0, config.longest_span * cost - 1)


class PictureOracles(Oracles):
    """Knows what each id of a picture that the prefix cache may have stands for: its tile's pixels, and which row."""

    make_liveness: ClassVar[type[Liveness]] = PictureLiveness
    meant: dict[int, tuple[bytes, Size, int]]
    places: dict[int, Place]

    def rows_of_ids(self, tokens: I32, salt: int, delta: int) -> Rows:
        known, version = self.scheduler.pools.pictures, self.scheduler.queues.weight_version
        assert known is not None
        rows: dict[int, int] = {}
        places: list[Place | None] = [None] * len(tokens)
        for at in np.flatnonzero(known.stand_for(tokens)).tolist():
            pixels, size, inside = self.meant[int(tokens[at])]
            rows[at] = rows_of_tile(pixels, size, version, known.config.num_layers)[inside]
            places[at] = self.places[int(tokens[at])]
        return Rows(rows, *rotated(places, delta)) if known.config.mrope else Rows(rows, NO_ROWS.offsets)


Place = tuple[tuple[int, int], int]
"""A token of a picture: the rows and columns of the picture's tokens, and which of them it is."""


def rotated(places: Sequence[Place | None], delta: int) -> tuple[I64, int]:
    """Return by how much more than its position M-RoPE rotates each of these tokens, [3, tokens], None being text, and
    one of text behind them. `delta`: one of text before them."""
    offsets = np.empty((3, len(places)), dtype=np.int64)
    for at, place in enumerate(places):
        (rows, columns), inside = place or ((1, 1), 0)
        offsets[:, at] = delta - inside + np.array([0, inside // columns, inside % columns])
        if inside == rows * columns - 1:
            delta += max(rows, columns) - rows * columns
    return offsets, delta


Shown = tuple[str, bytes, tuple[int, int], tuple[Size, ...]]
"""A picture as the engine must tell it from others: namespace, digest, grid and sizes of tiles."""


class Showing:
    """Mixed into a simulation: most prompts have pictures."""

    make_runner: ClassVar[type[HashRunner]] = PictureRunner
    make_oracles: ClassVar[type[Oracles]] = PictureOracles

    def __init__(self, config: SchedulerConfig, traffic: Traffic, *args: Any, **others: Any) -> None:
        self.dice = Random(self.seed_of(config, traffic))
        its = random_pictures(self.dice, traffic.vocab)
        if not num_states(config.kinds) and self.dice.random() < 0.5:
            its, config = replace(its, longest_span=LONGEST_RUN), with_longer_chunks(config)
        super().__init__(replace(config, pictures=its), traffic, *args, **others)  # type: ignore[call-arg]
        pools = self.scheduler.pools  # type: ignore[attr-defined]
        self.encoder = Encoder(its, pools.pictures)
        runner = self.runner  # type: ignore[attr-defined]
        runner.encoder, runner.rows, runner.runs, runner.dice = self.encoder, {}, {}, self.dice
        runner.breaks, runner.deltas = traffic.faults.not_finite, np.zeros(pools.rows.slots.num_rows, dtype=np.int64)
        self.oracles.meant, self.oracles.places = {}, {}  # type: ignore[attr-defined]
        self.album = Album(self.dice, its, traffic.longest_prompt)
        self.pictures: dict[int, Sequence[Picture]] = {}  # by request
        self.in_use: dict[int, set[Shown]] = {}  # by request: its pictures
        self.num_shown = self.num_without_room = self.num_alone = self.num_restarts = 0
        self.restarts = self.dice.choice([0.0, 0.0, 0.1])  # chance in a tick that numbers of pictures start again

    def seed_of(self, config: SchedulerConfig, traffic: Traffic) -> str:
        """Return what decides the pictures, the encoder among them."""
        return f"{config} {traffic}"

    def fits(self, shown: Collection[Shown]) -> bool:
        """Return whether one request may have these."""
        its = self.encoder.config
        blocks = [ceil(tokens_of(sizes) / its.block_rows) for _, _, _, sizes in shown]
        has_rows = sum(blocks) <= its.num_rows // its.block_rows
        return has_rows and pixels_of(shown) <= its.cache_bytes - its.num_rows * its.row_bytes

    def arrive(self) -> None:
        rng, params = self.rng, self.conversations.params()  # type: ignore[attr-defined]
        if self.dice.random() < 0.2:
            super().arrive()  # type: ignore[misc]
            return
        most = max(1, self.capacity - params.max_tokens)  # type: ignore[attr-defined]
        prompt = self.album.prompt(most if self.dice.random() < 0.95 else 1 << 20)
        self.add(
            prompt.tokens,
            params,
            priority=rng.randrange(3),
            namespace=rng.choice(self.traffic.namespaces),  # type: ignore[attr-defined]
            resume_points=self.conversations.resume_points(prompt.tokens),  # type: ignore[attr-defined]
            pictures=prompt.pictures,
        )

    def tick(self) -> bool:
        if self.dice.random() < self.restarts:
            scheduler = self.scheduler  # type: ignore[attr-defined]
            encoding.restart_ids(scheduler.queues, scheduler.memory.tiers, self.encoder.known)
            self.num_restarts += 1
        moved: bool = super().tick()  # type: ignore[misc]
        return moved

    def add(self, *args: Any, pictures: Sequence[Picture] = (), **others: Any) -> Any:
        self.pictures[self.num_added + 1] = pictures  # type: ignore[attr-defined]
        return self.noted(super().add(*args, pictures=pictures, **others), pictures)  # type: ignore[misc]

    def noted(self, tracked: Any, pictures: Sequence[Picture]) -> Any:
        """Note the pictures of the latest request, unless it was refused."""
        request_id = self.num_added  # type: ignore[attr-defined]
        if tracked is None:
            del self.pictures[request_id]
            return None
        self.num_shown += bool(pictures)
        self.runner.rows[request_id] = tracked.rows  # type: ignore[attr-defined]
        self.runner.runs[request_id] = sorted(run for its in pictures for run in its.runs)  # type: ignore[attr-defined]
        self.in_use[request_id] = shown_of(tracked.namespace, pictures)
        tokens = self.scheduler.added.tokens  # type: ignore[attr-defined]
        for its in pictures:
            meant = [(*tile, at) for tile in tiles_of(its) for at in range(num_tokens(tile[1], EDGE))]
            for inside, (at, what) in enumerate(zip(positions_of(its), meant, strict=True)):
                self.oracles.meant[tokens[at]] = what  # type: ignore[attr-defined]
                self.oracles.places[tokens[at]] = its.grid, inside  # type: ignore[attr-defined]
        return tracked

    def _rows(self, pictures: Sequence[Picture]) -> Rows:
        rows: dict[int, int] = {}
        places: dict[int, Place] = {}
        version = self.scheduler.queues.weight_version  # type: ignore[attr-defined]
        for its in pictures:
            num_layers = self.encoder.config.num_layers
            values = [row for tile in tiles_of(its) for row in rows_of_tile(*tile, version, num_layers)]
            rows |= dict(zip(positions_of(its), values, strict=True))
            places |= {at: (its.grid, inside) for inside, at in enumerate(positions_of(its))}
        if not self.encoder.config.mrope:
            return Rows(rows, NO_ROWS.offsets)
        return Rows(rows, *rotated([places.get(at) for at in range(max(places, default=-1) + 1)], 0))

    def _rows_again(self, tracked: Any) -> Rows:
        rows = self.runner.rows[tracked.id] = self._rows(self.pictures[tracked.id])  # type: ignore[attr-defined]
        return rows

    def _no_room_for(self, req: Request, pictures: Sequence[Picture]) -> str:
        """Pixels of living requests take room, once for each picture: tenants share it by their weights."""
        known, live = self.encoder.known, self.oracles.live  # type: ignore[attr-defined]
        own, in_use = shown_of(req.namespace, pictures), set[Shown]().union(*map(self.in_use.get, live, repeat(set())))
        error, new = "" if self.fits(own) else "RequestTooLarge", pixels_of(own - in_use)
        if not error and new and pixels_of(in_use) + new > known.max_bytes:
            paid = Counter[str]()
            for its in known._known.values():
                if its.users:
                    paid[its.payer] += len(its.pixels)
            weights = {tenant: known.rows.shares._tenants.weight(tenant) for tenant in {req.tenant, *paid}}
            share = max(1, known.max_bytes * weights[req.tenant] // sum(weights.values()))
            error = "Overloaded" if paid[req.tenant] + new > share else ""
        self.num_without_room += bool(error)
        return error

    def planned(self, plan: StepPlan | None, width: int) -> None:
        self.num_alone += bool(plan and plan.pictures.encodes and not plan.num_seqs)
        super().planned(plan, width)  # type: ignore[misc]

    def failing(self, plan: StepPlan) -> None:
        suspected = self.scheduler.queues.flights[0].suspected  # type: ignore[attr-defined]
        super().failing(plan)  # type: ignore[misc]
        if len(suspected) == 1:
            self._of(suspected[0][0].id, "may_fail")  # type: ignore[attr-defined]

    def drain_limit(self) -> int:
        limit: int = super().drain_limit()  # type: ignore[misc]
        return limit + self.tile_steps()

    def tile_steps(self) -> int:
        """Return the steps of each layer of each tile in one of its own, as often as a request may be set back."""
        live = (shown for id, shown in self.in_use.items() if id in self.oracles.live)  # type: ignore[attr-defined]
        num_tiles = sum(len(sizes) for shown in live for *_, sizes in shown)
        return 3 * num_tiles * self.encoder.config.num_layers

    def drain(self) -> int:
        self.runner.breaks = 0.0  # type: ignore[attr-defined]
        used: int = super().drain()  # type: ignore[misc]
        self.check_rest()
        return used

    def check_rest(self) -> None:
        """Require that nothing of pictures is left without requests."""
        known = self.scheduler.pools.pictures  # type: ignore[attr-defined]
        known.audit({})
        require(known.num_bytes == 0, f"{known.num_bytes} bytes of pixels are kept, and nobody is there")
        left = {number for number, _ in self.encoder.begun} - known.drops
        require(not left, f"unfinished work of pictures {left} is kept for ever")


def shown_of(namespace: str, pictures: Sequence[Picture]) -> set[Shown]:
    return {(namespace, its.digest, its.grid, its.sizes) for its in pictures}


def pixels_of(shown: Collection[Shown]) -> int:
    return sum(num_pixel_bytes(sizes) for _, _, _, sizes in shown)


def tokens_of(sizes: Sequence[Size]) -> int:
    return sum(num_tokens(size, EDGE) for size in sizes)


def tiles_of(its: Picture) -> Iterator[tuple[bytes, Size]]:
    """The pixels and the size of each tile."""
    at = 0
    for size in its.sizes:
        stop = at + num_pixel_bytes([size])
        yield its.pixels[at:stop], size
        at = stop


def positions_of(its: Picture) -> list[int]:
    return [at for start, length in its.runs for at in range(start, start + length)]


def with_longer_chunks(config: SchedulerConfig) -> SchedulerConfig:
    """Return the configuration with room in windows for chunks that are as long as a run has to be."""
    if not (num_pages := num_window_pages(config.kinds)):
        return config
    chunk, page_size, depth = config.chunked_prefill_size, config.page_size, config.overlap_depth
    least, most = (window_pages_in_flight(size, page_size, depth) for size in (chunk, max(chunk, LONGEST_RUN)))
    return replace(config, kinds=resized(config.kinds, num_window_pages=num_pages + most - least))


def random_pictures(dice: Random, vocab: int) -> PictureConfig:
    """Room for a few tiles: often fewer of one kind than of the other."""
    block_rows, num_pixels = dice.choice([1, 2, TOKENS, 5]), dice.choice([4, 8, 14])
    mrope = dice.random() < 0.5
    num_rows = dice.choice([6, 14, 20] if mrope else [3, 5, 8, 14]) * TOKENS // block_rows * block_rows
    num_layers = dice.choice([1, 2, 4])
    return PictureConfig(
        num_layers=num_layers,
        token_edge=EDGE,
        tile_size=None,
        max_edge=4 * EDGE,
        max_tokens=max(num_tokens(size, EDGE) for size in SIZES),
        token_cost=dice.choice([0.1, 0.3, 1.0, 7.0]),
        pair_cost=dice.choice([0.0, 0.1]),
        block_rows=block_rows,
        num_rows=num_rows,
        row_bytes=8,
        cache_bytes=num_rows * 8 + num_pixels * TILE_BYTES,
        vocab_size=vocab,
        placeholder=0,
        input_id=0,
        seen_tokens=dice.choice([(), tuple(dice.choice([1, 2, LONGEST_RUN]) for _ in range(num_layers))]),
        mrope=mrope,
    )


class PictureSimulation(Showing, Simulation):
    pass


class PictureSleeping(Showing, SleepingSimulation):
    """While the caches are released, or weights are new, nothing is left in the rows."""

    def release(self, tags: Collection[str]) -> None:
        super().release(tags)
        if KV_CACHE in tags:
            self.encoder.reset()

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        super().update(path, given, progress)
        self.encoder.reset()
        self.encoder.version = self.scheduler.queues.weight_version + 1


def run_seed(seed: int) -> PictureOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    times = {"expire_interval_s": 1e9} if seed % 2 else {}
    try:
        with scaled_down(Random(seed).choice([SHARED, admission.SHARE_WORTH_WAITING]), **times):
            return _outcome(random_simulation(seed))
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.pictures --seed {seed}")
        raise


def random_simulation(seed: int) -> Any:
    """Return the simulation of a seed."""
    rng, widths = Random(f"{seed} pictures"), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    traffic = random_traffic(rng, config)
    if seed % 4 == 0:
        config, traffic = with_tiers(Random(f"{seed} tiers"), config, traffic)
    every, skips = rng.choice([0, 0, 0, 3, 10]), rng.random() < 0.5

    def make_scheduler(asked: SchedulerConfig, proposer: Any) -> RetractingScheduler:
        return RetractingScheduler(asked, proposer, every=every, skips=skips)

    options: dict[str, Any] = {"widths": widths, "make_scheduler": make_scheduler}
    if seed % 2:
        chance, keeps = rng.choice([0.02, 0.1]), rng.random() < 0.5
        return PictureSleeping(config, traffic, rng, chance=chance, keeps=keeps, **options)
    return PictureSimulation(config, traffic, rng, **options)


def end_of_ids(sim: Any) -> int:
    """Return the end of the ids that pictures have in this simulation."""
    # Few ids more than those in use can take, scattered as they may be.
    most = 2 * sim.encoder.known.max_bytes * TOKENS // TILE_BYTES  # tokens; tenants have up to twice the room together
    end: int = sim.traffic.vocab + 2 * most + 12 if sim.dice.random() < 0.6 else MAX_VOCAB
    return end


def _outcome(sim: Any) -> PictureOutcome:
    with patch.object(memory, "END_OF_IDS", end_of_ids(sim)):
        outcome = sim.run()
    counters = sim.scheduler.pools.pictures.counters
    return PictureOutcome(
        steps=sim.num_steps,
        shown=sim.num_shown,
        refused=sim.num_without_room,
        hits=outcome.hits,
        cached=int(counters["picture_hits"]),
        tiles=int(counters["encoded_tiles"]),
        slices=sim.encoder.num_slices,
        alone=sim.num_alone,
        evicted=int(counters["evicted_encodings"]),
        drops=sim.encoder.num_drops,
        restarts=sim.num_restarts,
        spans=sim.runner.num_spans,
        turned=sim.runner.num_turned,
        digest=outcome.digest,
    )


def run_seeds(seeds: range) -> PictureOutcome:
    return sum(map(run_seed, seeds), PictureOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.pictures", __doc__ or "", run_seed, PictureOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
