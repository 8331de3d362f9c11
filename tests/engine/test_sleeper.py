"""The transitions of `Sleeper` in virtual time, over a real scheduler and a memory that fails at random (C25)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any

import pytest

from forebay.base.errors import Conflict, EngineError
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.engine.frames import KV_CACHE, TAGS, WEIGHTS, Release, Resume, UpdateWeights
from forebay.engine.lifecycle.sleep import RETRY_AFTER_S, Phase, Sleeper
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import CacheReport
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.rig import config


class Memory:
    """Which tags are there, and how often something was done; `fails` is raised by the next resume or update."""

    def __init__(self) -> None:
        self.there, self.fails, self.calls = set(TAGS), None, []
        self.kept = False

    def num_bytes(self) -> dict[str, int]:
        return dict.fromkeys(TAGS, 1)

    def check(self, tags: Collection[str]) -> None: ...

    def keep(self, places: Mapping[str, Any]) -> int:
        if self.fails:
            raise self.fails if isinstance(self.fails, RuntimeError) else MemoryError("no room for the copies")
        self.kept = True
        return 7

    def release(self, tags: Collection[str]) -> None:
        self.calls.append(("release", *tags))
        self.there -= set(tags)

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        self._fail()
        self.there |= set(tags)

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self._fail()
        self.there.add(WEIGHTS)

    def _fail(self) -> None:
        if self.fails:
            raise self.fails


class Rig:
    def __init__(self, role: Handoff | None = None, **options: bool) -> None:
        self.now, self.memory, self.scheduler = 0.0, Memory(), Scheduler(config(), None, role)
        self.sleeper = Sleeper(self.scheduler, self.memory, lambda: self.now, **options)
        self.updates: list[tuple[str | None, int]] = []
        self.sleeper.on_update = lambda path, version: self.updates.append((path, version))
        self.serial = 0

    def ask(self, kind: type, **fields: Any) -> str:
        """The code of the failure with which a frame is answered; empty for success, "pending" before an answer."""
        self.serial += 1
        self.sleeper.handle(kind(serial=self.serial, **fields))
        return self.answer()

    def answer(self) -> str:
        answers = self.sleeper.transitions.take_answers()
        return "pending" if not answers else (answers[0][1].code if answers[0][1] else "")

    def release(self, *tags: str, mode: str = "wait", timeout_s: float = 5.0) -> str:
        return self.ask(Release, tags=list(tags), mode=mode, timeout_s=timeout_s)

    def resume(self, *tags: str) -> str:
        return self.ask(Resume, tags=list(tags))

    def update(self) -> str:
        return self.ask(UpdateWeights, path="/there", mode="wait", timeout_s=5.0)

    def request(self) -> Request:
        req = Request(1 + self.scheduler._num_submitted, [1, 2, 3, 4, 5], SamplingParams(max_tokens=3))
        self.scheduler.add(req, self.now)
        return req

    def settle(self) -> None:
        self.sleeper.settle(self.now)


@pytest.mark.parametrize("seed", range(30))
def test_c25_sleeper_random_frames_agree_with_a_model(seed: int) -> None:
    rng, rig = Random(seed), Rig()
    released, paused, version = set(), False, 0
    for _ in range(80):
        rig.now += rng.random()
        tags = rng.sample(TAGS, rng.randrange(len(TAGS) + 1))
        rig.memory.fails = EngineError("no room", code="no_room") if rng.random() < 0.2 else None
        match rng.randrange(3):
            case 0:
                right = "released" if released & set(tags) else "paused" if not tags and paused else ""
                assert rig.release(*tags) == right
                if not right:
                    released |= set(tags)
                    paused = paused or not tags
            case 1:
                wrong = set(tags) - released or not (released or paused)
                right = "not_released" if wrong else "no_room" if rig.memory.fails else ""
                assert rig.resume(*tags) == right
                if not right:
                    released -= set(tags)
                    paused = paused and bool(tags)
            case _:
                right = "no_room" if rig.memory.fails else ""
                assert rig.update() == right
                if not right:
                    released.discard(WEIGHTS)
                    version += 1
                    assert rig.updates[-1] == ("/there", version)
        state, resting = rig.sleeper.state, bool(released) or paused
        assert (set(state.released), state.paused, state.weight_version) == (released, paused, version)
        assert rig.memory.there == set(TAGS) - released
        assert (rig.sleeper.resting, rig.sleeper.away, rig.scheduler.queues.admits) == (resting, resting, not resting)
        assert rig.sleeper.phase is (Phase.ASLEEP if resting else Phase.SERVING)


def running(rig: Rig) -> Request:
    """A request with a step in flight, so that a halt cannot be done."""
    req = rig.request()
    assert rig.scheduler.plan(rig.now) is not None
    return req


def test_sleeper_drain_over_its_time_goes_on_as_before() -> None:
    rig = Rig()
    running(rig)
    assert rig.release(KV_CACHE, timeout_s=3.0) == "pending"
    assert (rig.sleeper.phase, rig.scheduler.queues.admits) == (Phase.DRAINING, False)
    assert rig.release(WEIGHTS) == "in_transition"
    assert rig.resume() == "in_transition"
    rig.now = 2.9
    rig.settle()
    assert rig.answer() == "pending"
    rig.now = 3.0
    rig.settle()
    assert rig.answer() == "drain_timeout"
    assert (rig.sleeper.phase, rig.scheduler.queues.admits, rig.memory.there) == (Phase.SERVING, True, set(TAGS))


@pytest.mark.parametrize("pause", [False, True])
def test_sleeper_request_wakes_unless_it_is_paused_and_a_failed_wake_waits(pause: bool) -> None:
    rig = Rig(wake_on_request=True)
    assert rig.release(*TAGS) == ""
    assert not pause or rig.release() == ""
    rig.settle()
    assert rig.sleeper.resting
    rig.memory.fails = EngineError("no room")
    rig.request()
    rig.settle()
    rig.memory.fails = None
    rig.now += RETRY_AFTER_S / 2
    rig.settle()
    assert rig.sleeper.resting
    rig.now += RETRY_AFTER_S
    rig.settle()
    assert rig.sleeper.resting is pause
    assert rig.memory.there == (set() if pause else set(TAGS))


def test_sleeper_update_that_loses_the_weights_releases_them() -> None:
    rig = Rig()
    rig.memory.fails = Conflict("gone", code="weights_lost")
    assert rig.update() == "weights_lost"
    assert rig.sleeper.state.released == [WEIGHTS]
    assert ("release", WEIGHTS) in rig.memory.calls
    assert (rig.sleeper.away, rig.scheduler.queues.admits, rig.updates) == (True, False, [])
    assert rig.update() == "weights_lost"
    assert rig.sleeper.state.released == [WEIGHTS]


@pytest.mark.parametrize("fails", [MemoryError("none"), RuntimeError("not enough memory")], ids=["python", "torch"])
def test_sleeper_without_memory_for_copies_sleeps_and_keeps_nothing(fails: Exception) -> None:
    rig = Rig()
    rig.sleeper.keep_prefix_cache, rig.memory.fails = True, fails
    rig.sleeper.sleep([KV_CACHE])
    assert (rig.sleeper.state.released, rig.sleeper.state.kept_tokens) == ([KV_CACHE], 0)


class Guesser:
    """A proposer that notes which requests it is to forget."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def ended(self, req: Request) -> None:
        self.forgotten.append(req.id)


def test_sleeper_update_restarts_what_has_tokens_of_the_old_weights() -> None:
    rig = Rig()
    rig.scheduler.proposer = guesser = Guesser()  # type: ignore[assignment]
    begun, waits = rig.request(), rig.request()
    begun.tokens.append(7)
    rig.scheduler.queues.num_waiting_tokens += 1
    begun.cache_report = CacheReport()
    rig.scheduler.queues.suspects.add_group([(begun, 0)])
    assert rig.update() == ""
    assert [(update.request_id, update.restarted) for update in rig.scheduler.take_updates()] == [(begun.id, True)]
    assert (begun.num_output, begun.cache_report, guesser.forgotten) == (0, None, [begun.id])
    assert rig.scheduler.queues.num_waiting_tokens == 2 * begun.num_prompt
    assert not rig.scheduler.queues.suspects.groups, "steps failed with other weights"
    assert {req.weight_version for req in (begun, waits)} == {1}


def test_sleeper_each_transition_is_one_log_line_with_its_reason_or_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    caplog.set_level("INFO", "forebay")
    rig = Rig(wake_on_request=True, keep_prefix_cache=True)
    assert rig.update() == ""
    assert logged() == ["weights_updated version=1 path=/there"]
    rig.memory.fails = EngineError("no room", code="no_room")
    assert rig.update() == "no_room"
    assert logged() == ['transition_failed reason="no room"']
    rig.memory.fails = MemoryError("none")
    assert rig.release(*TAGS) == ""
    kept, asleep = logged()
    assert kept.startswith('prefix_cache_not_kept reason="no room for the copies"')
    assert asleep.startswith(f"asleep released={','.join(TAGS)} ")
    rig.memory.fails = EngineError("still none")
    rig.request()
    rig.settle()
    [failed] = logged()
    assert failed.startswith('wake_failed reason="still none" effect="asleep as before"')


def test_sleeper_request_that_waits_for_its_other_half_wakes() -> None:
    role = PrefillRole(DisaggregationOptions(mode=DisaggregationMode.PREFILL))
    rig = Rig(role, wake_on_request=True)
    assert rig.release(*TAGS) == ""
    req = Request(1, [1, 2, 3], SamplingParams(max_tokens=3), rendezvous=Rendezvous("here", 1, 5))
    rig.scheduler.add(req, rig.now)
    rig.settle()
    assert rig.memory.there == set(TAGS)


@pytest.mark.parametrize("fails", [False, True])
def test_sleeper_release_of_caches_keeps_them_or_forgets_them(fails: bool) -> None:
    rig = Rig(keep_prefix_cache=True)
    generations = rig.scheduler.pools.kv.generation.copy()
    pages = rig.scheduler.pools.kv.take_ids(4, 1)
    rig.scheduler.pools.kv.return_ids(pages, 1)
    rig.memory.fails = EngineError("no room") if fails else None
    cleared = []
    clear = rig.scheduler.pools.cache.clear
    rig.scheduler.pools.cache.clear = lambda **how: (cleared.append(how), clear(**how))  # type: ignore[method-assign]
    assert rig.release(KV_CACHE) == ""
    assert rig.memory.kept is not fails
    assert cleared == ([{"released": True}] if fails else []), "a miss later has this reason (C20)"
    assert (rig.scheduler.pools.kv.generation >= generations).all()
    rig.memory.fails = None
    assert rig.sleeper.state.kept_bytes == (0 if fails else 7)
    assert rig.update() == ""
    assert rig.sleeper.state.kept_bytes == 0
