"""Recorded engines with tiers or a role on a small model: their copies and transfers are executed (C18, C22, C30)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.base.record_buffer import Content
from forebay.cli import replay as command
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions, SchedulerConfig, StateStrategy
from forebay.engine.recorder import file, tiny
from forebay.engine.recorder.file import Header
from forebay.engine.recorder.recorder import Recorder, decode_all, origin_of
from forebay.engine.recorder.small_engine import TierRows
from forebay.engine.recorder.tiny import Executed
from forebay.memory.holding import DeferredFree
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import CACHE
from forebay.memory.tier import HOST, Tier
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Event,
    Offer,
    Offered,
    Rendezvous,
    Send,
    Sent,
    Span,
    Withdraw,
)
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.halt import Halt, Mode, forget_caches, resume, weights_changed
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.journal import Origin, Record, Transferred
from forebay.scheduler.memory.tiers import Tiers
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import Scheduler
from tests.kinds_of import kind_config
from tests.simulation.rig import config

NOTHING: Mapping[str, float] = {}
VOCABULARY = 60_000  # of the recorded model
LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"num_window_pages": 60, "window": 6},
    "falcon_h1": {"num_slots": 40, "strategy": StateStrategy.EXTRA_BUFFER, "track_interval": 8},
}


@dataclass
class Engine:
    """A recorded scheduler, and the steps that it has launched."""

    scheduler: Scheduler
    rng: Random
    flights: list[Any] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    loses: Mapping[str, float] = field(default_factory=dict)  # chance of each copy of a tier by its part of the plan

    def __post_init__(self) -> None:
        self.origin = origin_of(self.scheduler)
        self.scheduler.queues.journal = Recorder(
            lambda record, before=None: self.data.extend(filter(None, (before, record)))
        )

    def turn(self, now: float, halt: Halt | None = None) -> None:
        """Plan a step, and commit the oldest one if there are enough."""
        plan = (halt or self.scheduler).plan(now)
        self.flights += [] if plan is None else [plan]
        if self.flights and (plan is None or len(self.flights) > self.scheduler.config.overlap_depth):
            done = self.flights.pop(0)
            tokens = [self.rng.randrange(VOCABULARY) for _ in range(int(done.sample_mask.sum()))]
            lost = tuple(
                copy.number
                for part, chance in self.loses.items()
                for copy in getattr(done.host, part)
                if self.rng.random() < chance
            )
            self.scheduler.commit(done, StepResult(token_ids=tokens, lost=lost), now)
        self.scheduler.take_updates()

    def records(self, now: float) -> tuple[Origin, list[Record]]:
        """Return all records; the last plan is appended with one more input."""
        self.scheduler.expire(now)
        return self.origin, decode_all(self.data)


def prompt_of(rng: Random, prompts: list[list[int]]) -> list[int]:
    """Return a prompt that begins as an earlier one."""
    begin = rng.choice(prompts)[: rng.randrange(40)]
    prompts.append([*begin, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20)))][:48])
    return prompts[-1]


def params_of(rng: Random) -> SamplingParams:
    return SamplingParams(max_tokens=rng.randrange(1, 7), ignore_eos=True)


# -- tiers -------------------------------------------------------------------------------------------------------------


def in_tiers(like: str, names: Sequence[str] = (HOST,), num: int = 200) -> SchedulerConfig:
    """Return settings of an engine whose prefix cache has tiers of `num` slots of each kind behind the device."""
    kinds = kind_config(**LIKE[like], slot_bytes={"kv": 400, "window": 200, "state": 1000})
    kinds = replace(kinds, recompute_bytes_per_token=1 << 20)
    slots = {"kv": num, **dict.fromkeys(kinds.num_slots, num)}
    return config(num_pages=18, max_running_requests=4, kinds=kinds, tiers=dict.fromkeys(names, slots))


def recorded_tiers(
    settings: SchedulerConfig, seed: int = 0, num_requests: int = 20, loses: Mapping[str, float] = NOTHING
) -> Engine:
    """Record an engine whose requests have prefixes of earlier prompts, until all have ended."""
    rng, prompts, now, left = Random(seed), [[0] * 9], 0.0, num_requests
    engine = Engine(Scheduler(settings), rng, loses=loses)
    while left or engine.scheduler.requests or engine.flights:
        now += 1.0
        if left and rng.random() < 0.3:
            engine.scheduler.add(Request(1000 + left, prompt_of(rng, prompts), params_of(rng)), now)
            left -= 1
        engine.turn(now)
    return engine


def executed_tiers(engine: Engine, like: str) -> Executed:
    return tiny.run_on_tiny(*engine.records(1e6), like)


def is_clean(executed: Executed) -> bool:
    outcome = executed.outcome
    return (executed.fault, executed.error, outcome.difference, outcome.ended) == (None, "", None, "")


@pytest.mark.parametrize(("like", "names"), [("llama", [HOST, "disk"]), ("gpt_oss", [HOST]), ("falcon_h1", [HOST])])
def test_replay_on_tiny_loads_from_tiers_what_was_stored_there(like: str, names: list[str]) -> None:
    """C18, C30: among the copies some are lost, and what they would have written is poison."""
    engine = recorded_tiers(in_tiers(like, names), loses={"stores": 0.1, "fetches": 0.1})
    counters = engine.scheduler.memory.tiers.counters
    assert counters["tier_loaded_tokens"] > 0
    assert counters["tier_lost_stores"] + counters["tier_lost_loads"] > 0
    executed = executed_tiers(engine, like)
    assert is_clean(executed), executed
    assert executed.num_compared > 40


def test_replay_on_tiny_poisons_slots_of_a_tier_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: all of them at first, and of a small tier those that others are evicted for."""
    dropped = Counter[int]()
    monkeypatch.setattr(TierRows, "drop", lambda rows, kind, ids: dropped.update(ids.tolist()))
    assert is_clean(executed_tiers(recorded_tiers(in_tiers("llama", num=12)), "llama"))
    assert set(dropped) == {*range(1, 13)}
    assert max(dropped.values()) > 1


def swapped(tiers: Tiers, tier: Tier, here: Any, there: Any, record: bytes = b"") -> Any:
    """Copy to the slots of a tier in another order than its tree has them."""
    copy = COPY(tiers, tier, here, there, record)
    return msgspec.structs.replace(copy, there={kind: ids[::-1] for kind, ids in copy.there.items()})


def freed(tier: Tier, span: Any, mover: str) -> bool:
    """Free the pages of a tier that its tree gets."""
    is_attached = ATTACH(tier, span, mover)
    if tier.name == HOST:
        tier.kv.return_ids(span.pages, CACHE)
    return is_attached


def count_lost(tiers: Tiers, plan: Any, lost: Sequence[int]) -> None:
    """Take copies that were lost for made."""
    COMMITTED(tiers, plan, ())


COPY, COMMITTED, ATTACH = Tiers._copy, Tiers.committed, Tier.attach
TIER_FAULTS: dict[str, tuple[Mapping[str, float], type, str, Any]] = {
    "slots in another order": (NOTHING, Tiers, "_copy", swapped),
    "a lost store that counts": ({"stores": 0.5}, Tiers, "committed", count_lost),
    "a lost load that counts": ({"fetches": 0.5}, Tiers, "committed", count_lost),
    "pages that are cached and free": (NOTHING, Tier, "attach", freed),
}


@pytest.mark.parametrize("planted", TIER_FAULTS)
def test_replay_on_tiny_fault_of_a_tier_is_shown(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loses, owner, name, faulty = TIER_FAULTS[planted]
    monkeypatch.setattr(owner, name, faulty)
    executed = executed_tiers(recorded_tiers(in_tiers("llama"), loses=loses), "llama")
    assert (executed.outcome.difference, executed.outcome.ended) == (None, "")
    assert executed.fault is not None


def test_replay_on_tiny_refuses_an_engine_that_began_with_files_of_the_prefix_cache() -> None:
    engine = recorded_tiers(in_tiers("llama"), num_requests=1)
    origin, records = engine.records(1e6)
    began = msgspec.structs.replace(origin, state="files of the prefix cache")
    with pytest.raises(ConfigError, match="began with files of the prefix cache, whose content no record has"):
        tiny.run_on_tiny(began, records, "llama")


# -- roles -------------------------------------------------------------------------------------------------------------


class Pair:
    """Two recorded engines with a role, and the transfers between them, each as late as chance has it."""

    def __init__(self, settings: SchedulerConfig, seed: int) -> None:
        self.rng, self.now = Random(seed), 0.0
        self.prefill, self.decode = (self._engine(settings, mode) for mode in ("prefill", "decode"))
        self.events: list[tuple[Engine, Event]] = []  # on their way
        self.requests: dict[int, int] = {}  # of decode by room

    def _engine(self, settings: SchedulerConfig, mode: str) -> Engine:
        options = DisaggregationOptions(mode=DisaggregationMode(mode), num_reserved_decode_tokens=4)
        if options.is_decode:
            options = replace(options, decode_extra_slots=2)
        role: Handoff = DecodeRole(options, "d") if options.is_decode else PrefillRole(options)
        return Engine(Scheduler(replace(settings, disaggregation=options), None, role), self.rng)

    def run(self, num_requests: int) -> None:
        """Let requests come to both, some of which end early, until both are idle."""
        prompts, left = [[0] * 9], num_requests
        while left or self.events or self.prefill.scheduler.requests or self.decode.scheduler.requests:
            self.now += 0.1
            if left and self.rng.random() < 0.3:
                self._add(1000 + left, prompt_of(self.rng, prompts), params_of(self.rng))
                left -= 1
            if self.rng.random() < 0.05 and (living := [*self.decode.scheduler.requests]):
                self.decode.scheduler.abort(self.rng.choice(living))
            for engine in (self.prefill, self.decode):
                engine.scheduler.expire(self.now)
                engine.turn(self.now)
                self._take_orders(engine)
            for _ in range(self.rng.randrange(3)):
                self._tell()

    def _add(self, number: int, prompt: list[int], params: SamplingParams) -> None:
        for engine, nonce in ((self.prefill, b""), (self.decode, b"%d" % number)):
            req = Request(number, prompt, params, rendezvous=Rendezvous("prefill", 1, number, nonce))
            engine.scheduler.add(req, self.now)

    def _take_orders(self, engine: Engine) -> None:
        for order in engine.scheduler.handoff.tickets.take_orders():
            match order:
                case Offer(ticket=ticket):
                    self.events.append((self.prefill, Offered(ticket, order.num_tokens, order.digest, order.start)))
                case Send(ticket=ticket, tail=tail) if tail:
                    self.events += [(self.decode, Arrived(ticket, tail)), (self.prefill, Sent(ticket))]
                    self._close(ticket)
                case Decline():
                    declined = Offered(order.ticket, order.num_tokens, order.digest, 0, declined=order.failure)
                    self.events.append((self.prefill, declined))
                case Withdraw(ticket=ticket):
                    other = self.decode if engine is self.prefill else self.prefill
                    self.events.append((other, Broken(ticket, order.failure)))
                    self._close(ticket)
                case _:
                    pass

    def _close(self, ticket: Any) -> None:
        if not any(event == Closed(ticket) for _, event in self.events):
            self.events += [(engine, Closed(ticket)) for engine in (self.decode, self.prefill)]

    def _tell(self) -> None:
        """Let an engine take one event; those of a ticket come in order."""
        if self.events:
            chosen = self.rng.choice(self.events)[1].ticket
            at = next(i for i, (_, event) in enumerate(self.events) if event.ticket == chosen)
            engine, event = self.events.pop(at)
            engine.scheduler.handoff.take(event, self.now)
            engine.scheduler.take_updates()
            self._take_orders(engine)


def recorded_pair(like: str, seed: int = 0, num_requests: int = 24) -> Pair:
    kinds = kind_config(**LIKE[like])
    pair = Pair(config(max_running_requests=4, num_pages=60, kinds=kinds), seed)
    pair.run(num_requests)
    return pair


def executed_role(pair: Pair, role: str, like: str) -> Executed:
    engine: Engine = getattr(pair, role)
    return tiny.run_on_tiny(*engine.records(pair.now), like)


@pytest.mark.parametrize("like", ["llama", "falcon_h1"])
def test_replay_on_tiny_decode_engine_goes_on_from_what_another_computed(like: str) -> None:
    pair = recorded_pair(like)
    arrived = [record for record in pair.decode.records(pair.now)[1] if isinstance(record, Transferred)]
    assert sum(record.kind == "Arrived" for record in arrived) > 10
    executed = executed_role(pair, "decode", like)
    assert is_clean(executed), executed
    assert executed.num_compared > 20


@pytest.mark.parametrize("like", ["gpt_oss", "falcon_h1"])
def test_replay_on_tiny_prefill_engine_sends_what_a_request_alone_goes_on_from(like: str) -> None:
    pair = recorded_pair(like)
    executed = executed_role(pair, "prefill", like)
    assert is_clean(executed), executed
    assert executed.num_compared > 20


def run_early(role: DecodeRole, event: Event, open_ticket: Any, now: float) -> None:
    """Let a request run when all is said to have arrived, although the writer may write once more."""
    TAKE(role, event, open_ticket, now)
    req = open_ticket and open_ticket.req
    if isinstance(event, Arrived) and req and open_ticket.settled:
        open_ticket.req = None
        role._of.pop(req.id)
        role._append_first(req, event.tail, now)


def skip_page(role: PrefillRole, req: Request) -> None:
    """Send all but the last of the first whole pages."""
    sending = role._sending(req)
    before = sending.next if sending else 0
    COMPUTED(role, req)
    if sending and sending.next > before == sending.start:
        span = sending.named[-1][KV]
        sending.named[-1] = {KV: Span(start=span.start, ids=span.ids[:-1])}


TAKE, COMPUTED = DecodeRole._take, PrefillRole.computed
ROLE_FAULTS: dict[str, tuple[str, type, str, Any]] = {
    "places that are freed before the ticket": (
        "decode",
        DeferredFree,
        "is_free",
        property(lambda entry: entry.fence.is_open),
    ),
    "a request that runs before its ticket is closed": ("decode", DecodeRole, "_take", run_early),
    "memory that is freed before it is sent": (
        "prefill",
        DeferredFree,
        "is_free",
        property(lambda entry: entry.fence.is_open),
    ),
    "a page that is not sent": ("prefill", PrefillRole, "computed", skip_page),
}


@pytest.mark.parametrize("planted", ROLE_FAULTS)
def test_replay_on_tiny_fault_of_a_transfer_is_shown(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role, owner, name, faulty = ROLE_FAULTS[planted]
    monkeypatch.setattr(owner, name, faulty)
    executed = executed_role(recorded_pair("llama"), role, "llama")
    assert (executed.outcome.difference, executed.outcome.ended) == (None, "")
    assert executed.fault is not None


def test_replay_on_tiny_of_a_file_of_a_prefill_engine_says_what_was_sent_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C29: the file has no tokens, and the fault is shown all the same."""
    monkeypatch.setattr(PrefillRole, "computed", skip_page)
    pair = recorded_pair("llama")
    origin, _ = pair.prefill.records(pair.now)
    path, content = tmp_path / "one.bin", Content(msgspec.msgpack.encode(origin), pair.prefill.data, 0)
    file.write(path, Header(model={"model_type": "llama"}), content)
    assert command.run([str(path), "--on", "tiny"]) == 1
    assert re.search(r"what was sent up to step \d+ gives request \d+ at position \d+ token", capsys.readouterr().out)


# -- halts -------------------------------------------------------------------------------------------------------------


def halted(settings: SchedulerConfig, change: Callable[[Scheduler], None]) -> Engine:
    """Record an engine that is halted while requests decode, and goes on behind `change`. One then ends early."""
    engine, now = Engine(Scheduler(settings), Random(0)), 0.0
    for number in range(1, 7):
        prompt = [engine.rng.randrange(VOCABULARY) for _ in range(10)]
        engine.scheduler.add(Request(number, prompt, SamplingParams(max_tokens=8, ignore_eos=True)), now)
    for _ in range(8):
        engine.turn(now)
    halt = Halt(engine.scheduler, Mode.RETRACT)
    while not halt.done:
        engine.turn(now, halt)
    change(engine.scheduler)
    resume(engine.scheduler, now)
    for _ in range(3):
        engine.turn(now)
    engine.scheduler.abort(2)  # with fewer tokens than before the halt
    while engine.scheduler.requests or engine.flights:
        engine.turn(now)
    return engine


def test_replay_on_tiny_requests_that_begin_again_with_other_weights_have_no_older_tokens() -> None:
    """C25: the tokens of the request that ended early were others before."""
    engine = halted(config(), lambda scheduler: weights_changed(scheduler, 1))
    executed = tiny.run_on_tiny(*engine.records(1.0), "llama")
    assert is_clean(executed), executed
    assert executed.num_requests == 6


def test_replay_on_tiny_memory_that_is_free_and_yet_to_be_copied_to_the_host_is_not_poisoned() -> None:
    kinds = kind_config(slot_bytes={"kv": 400}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=1 << 20)
    engine = halted(config(kinds=kinds), lambda scheduler: forget_caches(scheduler, 0.0))
    assert engine.scheduler.counters["retractions_kept"] > 0
    executed = tiny.run_on_tiny(*engine.records(1.0), "llama")
    assert is_clean(executed), executed
    assert executed.num_compared > 30
