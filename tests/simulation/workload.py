"""Random configurations and traffic, from a seeded generator only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final
from unittest.mock import patch

from forebay.config.engine_config import (
    EvictionPolicy,
    KindConfig,
    Ledger,
    SchedulePolicy,
    SchedulerConfig,
    SpeculationOptions,
    SpeculativeAlgorithm,
    StateStrategy,
)
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.memory.retention import RetentionRequest
from forebay.requests.sampling_params import SamplingParams
from tests.kinds_of import kind_config, num_states, num_window_pages, resized, window_of
from tests.simulation.grammars import grammar_of
from tests.simulation.hashing import HashModel
from tests.simulation.restricted import restricted

MOST_WIDTH: Final = 8
_SPARE_FACTOR = 1
NGRAM_CAPACITY: Final = 60  # tokens: outputs come and go
PROPOSED_ON: Final = (SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.EAGLE)  # the host, the device


@contextmanager
def least_pools() -> Iterator[None]:
    """Inside, no engine has more states or windows than its rows need at least."""
    with patch(f"{__name__}._SPARE_FACTOR", 0):
        yield


def spare_slots(rng: Random, *choices: int) -> int:
    """Choose the slots of a pool beside those that rows need."""
    return _SPARE_FACTOR * rng.choice(choices)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances per tick, or per step, of what goes wrong."""

    abort: float = 0.0
    flush: float = 0.0
    windows_lost: float = 0.0  # the cache's, as when somebody needs them more
    launch_fails: float = 0.0
    result_fails: float = 0.0
    not_finite: float = 0.0
    between_steps: float = 0.0
    fetch_lost: float = 0.0  # of a copy from another tier of the cache


@dataclass(frozen=True, kw_only=True)
class Traffic:
    num_requests: int
    arrivals: float  # mean number per tick
    vocab: int
    longest_prompt: int
    longest_output: int
    namespaces: tuple[str, ...] = ("",)
    tenants: tuple[str, ...] = ("",)
    sharing: float = 0.6  # chance that a prompt begins like an earlier conversation
    twins: float = 0.0  # chance that it is the one before once more
    retries: float = 0.0  # chance that the next one is one whose request failed
    stopping: float = 0.5  # chance of stop tokens
    tick_s: float = 0.01
    resume_points: float = 0.0  # chance that a request names lengths at which others will go on
    keeping: float = 0.0  # chance that a request wants prefixes of its prompt kept
    grammars: float = 0.0  # chance of one
    restricted: float = 0.0  # chance that some tokens may not come
    pooled: float = 0.0  # chance that nothing is generated behind a prompt, which becomes a vector
    faults: Faults = field(default_factory=Faults)

    def model(self, config: SchedulerConfig) -> HashModel:
        """The model that has the layers of `config`; without full attention where pages have no bytes."""
        state = config.kinds
        return HashModel(
            vocab=self.vocab,
            full=state.slot_bytes.get("kv", 0) > 0 or not (num_states(state) or num_window_pages(state)),
            window=window_of(state) if num_window_pages(state) else 0,
            recurrent=num_states(state) > 0,
        )


def random_config(rng: Random) -> SchedulerConfig:
    kinds = rng.choice(["plain", "plain", "states", "states", "windows", "both"])
    page_size = rng.choice([1, 1, 2, 3, 4, 7, 8, 16])
    extra, none = StateStrategy.EXTRA_BUFFER, StateStrategy.NO_BUFFER
    strategy = rng.choice([extra, none, none]) if page_size == 1 else extra
    num_pages = max(2, rng.choice([12, 24, 48, 96, 200]) // page_size + rng.randrange(4))
    hurried = rng.random() < 0.15
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=rng.choice([1, 2, 4, 8, 8]),
        context_length=rng.choice([16, 40, 64, 100]),
        chunked_prefill_size=rng.choice(
            [1, 3, 7, page_size, 16, *([64, 2048] if kinds in ("plain", "states") else [])]
        ),
        schedule_policy=rng.choice(list(SchedulePolicy)),
        schedule_conservativeness=rng.choice([0.01, 0.01, 0.3, 1.0]),
        radix_cache=rng.random() < 0.8,
        radix_eviction_policy=rng.choice(list(EvictionPolicy)),
        overlap_depth=rng.choice([0, 0, 1, 1, 2, 2]),
        max_queued_requests=rng.choice([2, 256, 256, 256]),
        max_queued_tokens=rng.choice([30, 1 << 20, 1 << 20]),
        queue_timeout_s=0.1 if hurried else 60.0,
        request_timeout_s=0.3 if hurried else 600.0,
        stall_timeout_s=0.1 if hurried else 60.0,
        ledger=Ledger.RAISE,
    )
    state = kind_config(
        num_slots=_num_slots(rng, config, strategy) if kinds in ("states", "both") else 0,
        strategy=strategy,
        track_interval=page_size * rng.choice([1, 1, 2, 4]),
        anchor_interval=rng.choice([4, 16, 1024]),
        slot_bytes={
            "kv": 100 * page_size if kinds == "plain" or rng.random() < 0.7 else 0,
            "window": 50 * page_size,
            "state": 1000,
        },
        retraction_host_bytes=rng.choice([0, 3000, 1 << 30]),
        recompute_bytes_per_token=rng.choice([150, 1 << 20]),
    )
    if kinds in ("windows", "both"):
        state = _with_windows(rng, config, state)
    mixed = max(1, config.chunked_prefill_size // 3) if config.num_pages % 2 else config.chunked_prefill_size
    return replace(config, kinds=state, mixed_chunk_size=mixed)


def with_speculation(rng: Random, config: SchedulerConfig) -> SchedulerConfig:
    """For half of the configurations. Nothing else changes."""
    algorithm = rng.choice([SpeculativeAlgorithm.OFF, SpeculativeAlgorithm.OFF, *PROPOSED_ON])
    if algorithm is SpeculativeAlgorithm.OFF:
        return config
    return speculating(config, algorithm, rng.randint(2, MOST_WIDTH))


def speculating(config: SchedulerConfig, algorithm: SpeculativeAlgorithm, width: int) -> SchedulerConfig:
    """The same with decodes of up to `width` tokens, and room for their windows."""
    kinds, ahead = config.kinds, (config.overlap_depth + 1) * (width - 1)
    if num_window_pages(kinds):
        more = config.max_running_requests * -(-ahead // config.page_size)
        kinds = resized(kinds, num_window_pages=num_window_pages(kinds) + more)
    return replace(
        config,
        kinds=kinds,
        speculation=SpeculationOptions(algorithm=algorithm, num_draft_tokens=width, ngram_capacity=NGRAM_CAPACITY),
    )


def _num_slots(rng: Random, config: SchedulerConfig, strategy: StateStrategy) -> int:
    """Few: what running requests need, and some to cache states in."""
    extra_buffer = strategy is StateStrategy.EXTRA_BUFFER and config.radix_cache
    per_request = 1 + tracking_slots(extra_buffer, config.overlap_depth)
    return config.max_running_requests * per_request + spare_slots(rng, 0, 1, 1, 2, 4, 16)


def _with_windows(rng: Random, config: SchedulerConfig, state: KindConfig) -> KindConfig:
    """What running requests need at least, and some to cache windows in."""
    window, depth = min(rng.choice([2, 3, 5, 8, 17, 40]), config.context_length), config.overlap_depth
    tracked = state.track_interval if num_states(state) else 0
    pages = config.max_running_requests * window_pages_per_request(window, config.page_size, depth, tracked)
    pages += window_pages_in_flight(config.chunked_prefill_size, config.page_size, depth)
    return resized(state, window=window, num_window_pages=pages + spare_slots(rng, 0, 0, 2, 16))


def random_traffic(rng: Random, config: SchedulerConfig) -> Traffic:
    capacity = min(config.context_length, config.num_pages * config.page_size)
    if num_window_pages(config.kinds) and rng.random() < 0.4:
        return _lossy(rng, capacity)
    calm = rng.random() < 0.25
    pressed = rng.random() < 0.4  # many short prompts at once that all want to grow: retractions
    return Traffic(
        num_requests=rng.randint(12, 44),
        arrivals=rng.choice([1.0, 4.0] if pressed else [0.1, 0.4, 1.0, 4.0]),
        vocab=rng.choice([3, 30, 30, 1000]),
        longest_prompt=max(1, capacity // (6 if pressed else rng.choice([4, 2, 1]))),
        longest_output=max(1, capacity * 2 // 3) if pressed else rng.choice([2, 8, 24]),
        namespaces=("",) if rng.random() < 0.6 else ("", "a", "b"),
        sharing=rng.choice([0.0, 0.8, 0.95]),
        retries=rng.choice([0.0, 0.9]),
        twins=rng.choice([0.0, 0.9]) if pressed else rng.choice([0.0, 0.0, 0.5]),
        stopping=0.1 if pressed else rng.choice([0.0, 0.3, 0.7]),
        tick_s=rng.choice([0.001, 0.02]),
        resume_points=rng.choice([0.0, 0.5]),
        faults=Faults()
        if calm
        else Faults(
            abort=rng.choice([0.0, 0.03, 0.2]),
            flush=rng.choice([0.0, 0.05]),
            windows_lost=rng.choice([0.0, 0.1, 0.4]),
            launch_fails=rng.choice([0.0, 0.02, 0.02, 0.1]),
            result_fails=rng.choice([0.0, 0.02, 0.1]),
            not_finite=rng.choice([0.0, 0.02]),
            between_steps=rng.choice([0.0, 0.0, 0.02]),
        ),
    )


def with_tenants(rng: Random, config: SchedulerConfig, traffic: Traffic) -> tuple[SchedulerConfig, Traffic]:
    """The same requests of two to four tenants, of which one often has most."""
    names = tuple("abcd"[: rng.randint(2, 4)])
    weights = {name: rng.choice([1, 1, 1, 2, 5]) for name in names}
    several = names if rng.random() < 0.5 else (*names, *names[:1] * 6)
    traffic = replace(traffic, tenants=several)
    if rng.random() < 0.6:  # more wait than can run, for long
        outputs = max(traffic.longest_output, min(config.context_length, config.num_pages * config.page_size) // 3)
        traffic = replace(traffic, num_requests=50, arrivals=4.0, longest_output=outputs, stopping=0.1)
    return replace(config, tenants=weights), traffic


def with_tiers(rng: Random, config: SchedulerConfig, traffic: Traffic) -> tuple[SchedulerConfig, Traffic]:
    """The same with one or two tiers behind a prefix cache that is used, and conversations that go on."""
    if not config.radix_cache and num_states(config.kinds):  # which had no slots to track states in
        tracking = tracking_slots(config.kinds.strategy is StateStrategy.EXTRA_BUFFER, config.overlap_depth)
        more = config.max_running_requests * tracking
        config = replace(config, kinds=resized(config.kinds, num_slots=num_states(config.kinds) + more))
    num_slots = {"kv": config.num_pages, **config.kinds.num_slots}
    names = rng.choice([("host",), ("host", "disk"), ("disk",)])
    tiers = {
        name: {kind: max(1, int(n * rng.choice([0.3, 1, 4, 10]))) for kind, n in num_slots.items()} for name in names
    }
    config = replace(config, tiers=tiers, radix_cache=True)
    config = replace(config, kinds=replace(config.kinds, recompute_bytes_per_token=rng.choice([150, 1 << 20, 1 << 20])))
    faults = replace(traffic.faults, fetch_lost=rng.choice([0.0, 0.0, 0.1, 0.5]))
    return config, replace(traffic, sharing=rng.choice([0.8, 0.95]), num_requests=40, faults=faults)


def with_keeping(rng: Random, config: SchedulerConfig, traffic: Traffic) -> tuple[SchedulerConfig, Traffic]:
    """The same with clients that want parts of the prefix cache kept, often more than they may. If it is off, it stays
    off: the pools then have no slots to track states in."""
    config = replace(config, pinned_cache_fraction=rng.choice([0.25, 1.0, 1.0]))
    keeping = replace(traffic, num_requests=30, sharing=rng.choice([0.8, 0.95]), keeping=rng.choice([0.3, 0.9]))
    return config, replace(keeping, num_requests=60 if config.tiers else 30)


def retentions_of(rng: Random, prompt: Sequence[int]) -> list[RetentionRequest]:
    """Return up to four prefixes of a prompt that its client wants kept, for as long as others take or for good."""
    ends = sorted(rng.randrange(1, len(prompt) + 3) for _ in range(rng.randint(1, 4)))
    return [RetentionRequest(end, rng.choice([0.01, 0.1, 100.0])) for end in ends]


def _lossy(rng: Random, capacity: int) -> Traffic:
    """The same prompts again and again, whose windows the cache loses, by steps that often cannot be launched."""
    return Traffic(
        num_requests=rng.randint(12, 30),
        arrivals=rng.choice([0.1, 0.4]),
        vocab=30,
        longest_prompt=max(1, capacity // rng.choice([2, 3])),
        longest_output=rng.choice([2, 6]),
        sharing=0.95,
        retries=0.9,
        twins=rng.choice([0.5, 0.9]),
        stopping=0.0,
        faults=Faults(windows_lost=rng.choice([0.1, 0.3]), launch_fails=rng.choice([0.02, 0.1])),
    )


class Conversations:
    """Prompts that share prefixes: fresh ones, continuations of whole conversations, and branches off them.

    Nine in ten are cut so that they fit `capacity` tokens with all their output.
    """

    def __init__(self, rng: Random, traffic: Traffic, capacity: int) -> None:
        self._rng, self._traffic, self._capacity = rng, traffic, capacity
        self._past: list[list[int]] = []
        self._last: list[int] = []
        self._failed: list[tuple[list[int], str]] = []

    def prompt(self, max_tokens: int) -> list[int]:
        twin = self._last and self._rng.random() < self._traffic.twins
        prompt = self._last = list(self._last) if twin else self._long_prompt()
        if self._rng.random() < 0.9:
            del prompt[max(1, self._capacity - max_tokens) :]
        if self._rng.random() < 0.3:
            self.remember(prompt)  # others may begin like it while it is under way
        return prompt

    def _long_prompt(self) -> list[int]:
        rng, traffic = self._rng, self._traffic
        prompt: list[int] = []
        if self._past and rng.random() < traffic.sharing:
            prompt = list(rng.choice(self._past))
            if rng.random() < 0.5:
                prompt = prompt[: rng.randint(0, len(prompt))]
        room = traffic.longest_prompt - len(prompt)
        more = rng.randint(0, min(6, max(room, 0))) if prompt else rng.randint(1, traffic.longest_prompt)
        prompt += [rng.randrange(traffic.vocab) for _ in range(more)]
        return prompt or [rng.randrange(traffic.vocab)]

    def failed(self, prompt: Sequence[int], namespace: str) -> None:
        """A client whose request failed may send it again."""
        self._failed.append((list(prompt), namespace))

    def again(self) -> tuple[list[int], str] | None:
        """What a client sends once more, if one does."""
        if not self._failed or self._rng.random() >= self._traffic.retries:
            return None
        return self._failed.pop(0)

    def resume_points(self, prompt: Sequence[int]) -> list[int]:
        """Lengths that a client might name, not all of them sensible."""
        if self._rng.random() >= self._traffic.resume_points:
            return []
        return sorted(self._rng.randrange(len(prompt) + 3) for _ in range(3))

    def remember(self, tokens: Sequence[int]) -> None:
        self._past.append(list(tokens))
        if len(self._past) > 12:
            self._past.pop(self._rng.randrange(len(self._past)))

    def params(self) -> SamplingParams:
        rng, traffic = self._rng, self._traffic
        stops = tuple(rng.randrange(traffic.vocab) for _ in range(2)) if rng.random() < traffic.stopping else ()
        params = SamplingParams(
            max_tokens=rng.randint(1, traffic.longest_output),
            seed=rng.choice([0, rng.getrandbits(62)]),
            stop_token_ids=stops,
            logprobs=rng.choice([-1, -1, 0]),
            prompt_logprobs=rng.choice([-1, -1, -1, -1, -1, 0]),
            grammar=grammar_of(rng.randrange(5)) if traffic.grammars and rng.random() < traffic.grammars else None,
        )
        if traffic.restricted and rng.random() < traffic.restricted:
            return restricted(rng, params, traffic.vocab)
        return params
