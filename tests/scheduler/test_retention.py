"""Requests whose clients want a prefix kept: granted, extended, reported, and in nobody's way (C8, C19, C20)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.engine.lifecycle.sleep import NoMemory, Sleeper
from forebay.memory.miss_reason import MissReason
from forebay.memory.retention import NotKept, RetentionRequest
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, MemoryReport
from forebay.scheduler.halt import Halt, Mode, forget_caches, keep_cached, resume
from tests.kinds_of import kind_config
from tests.scheduler.rig import Rig

PROMPT = list(range(16))


def kept(rig: Rig, req: Request) -> tuple[int, float, str]:
    """The tokens that are kept of a request, for how long, and why no more."""
    reports = [update.memory for update in rig.updates if update.request_id == req.id and update.finish]
    report = reports[0] or MemoryReport(not_kept=NotKept.NOT_ASKED)
    return report.kept_tokens, report.kept_s, report.not_kept


def ask(rig: Rig, prompt: Any, *retentions: RetentionRequest, max_new: int = 2, **more: Any) -> Request:
    req = rig.add(prompt, max_new=max_new, retentions=retentions, **more)
    rig.run()
    return req


def found(rig: Rig, prompt: list[int]) -> tuple[int, MissReason]:
    req = rig.add([*prompt, 5000], max_new=1)
    rig.run()
    report = next(u.cache for u in rig.updates if u.request_id == req.id and u.cache)
    return report.cached_tokens, report.miss_reason


def fill(rig: Rig, num: int = 20) -> None:
    """Requests of others, which take all memory one after another."""
    for i in range(num):
        rig.add([10_000 + 100 * i + j for j in range(40)], max_new=1)
        rig.run()


def test_c20_request_that_asks_for_it_is_told_what_is_kept_and_for_how_long() -> None:
    rig = Rig()
    assert kept(rig, ask(rig, PROMPT, RetentionRequest(16, 300.0))) == (16, 300.0, "")
    assert kept(rig, ask(rig, 12)) == (0, 0.0, NotKept.NOT_ASKED)


def test_kept_prefix_is_there_after_others_have_taken_all_memory() -> None:
    rig = Rig()
    ask(rig, PROMPT, RetentionRequest(16, 300.0))
    fill(rig)
    assert found(rig, PROMPT) == (16, MissReason.NONE)


def test_prefix_whose_time_is_over_is_evicted_as_any() -> None:
    rig = Rig()
    ask(rig, PROMPT, RetentionRequest(16, 300.0))
    rig.now = 300.0
    fill(rig)
    assert found(rig, PROMPT)[0] == 0


def test_hit_extends_the_time_and_is_told_so() -> None:
    rig = Rig()
    ask(rig, PROMPT, RetentionRequest(16, 300.0))
    rig.now = 200.0
    assert kept(rig, ask(rig, [*PROMPT, 77])) == (16, 300.0, NotKept.NOT_ASKED)
    rig.now = 499.0
    fill(rig)
    assert found(rig, PROMPT)[0] == 16


def test_prefixes_of_several_lengths_have_their_own_times() -> None:
    rig = Rig()
    req = ask(rig, PROMPT, RetentionRequest(8, 3600.0), RetentionRequest(16, 300.0))
    assert kept(rig, req) == (16, 300.0, "")
    rig.now = 301.0
    fill(rig)
    assert found(rig, PROMPT)[0] == 8


@pytest.mark.parametrize(
    ("asked", "changes", "why"),
    [
        (RetentionRequest(3, 300.0), {}, MissReason.BELOW_PAGE),
        (RetentionRequest(16, 300.0), {"radix_cache": False}, MissReason.DISABLED),
        (RetentionRequest(16, 300.0), {"pinned_cache_fraction": 0.0}, NotKept.OVER_LIMIT),
        (RetentionRequest(16, 300.0), {"pinned_cache_fraction": 3 / 64}, NotKept.OVER_LIMIT),
    ],
)
def test_c20_request_is_told_why_nothing_is_kept(asked: RetentionRequest, changes: dict[str, Any], why: str) -> None:
    rig = Rig(**changes)
    assert kept(rig, ask(rig, PROMPT, asked)) == (0, 0.0, why)
    assert rig.scheduler.counters["prefixes_not_kept"] == 1


def test_prompt_that_was_not_computed_is_not_kept() -> None:
    rig = Rig(chunked_prefill_size=8)
    req = rig.add(PROMPT, retentions=(RetentionRequest(16, 300.0),))
    rig.step()
    rig.updates += rig.abort(req.id)
    rig.run()
    assert kept(rig, req) == (0, 0.0, NotKept.UNFINISHED)
    assert rig.scheduler.pools.cache.retention.num_pages == 0


def test_c30_request_that_failed_is_not_kept() -> None:
    rig = Rig()
    rig.add(PROMPT, retentions=(RetentionRequest(16, 300.0),))
    rig.launch()
    rig.commit(failed=(0,))
    assert rig.scheduler.pools.cache.retention.num_pages == 0


def test_prompt_is_kept_while_its_answer_is_generated() -> None:
    rig = Rig(num_pages=16, context_length=64)
    req = rig.add(PROMPT, max_new=40, retentions=(RetentionRequest(16, 300.0),))
    rig.step()
    assert rig.scheduler.pools.cache.retention.num_pages == 4
    rig.scheduler.preemption.retract(req)
    rig.run()
    assert rig.finish_of(req) is FinishReason.LENGTH


def test_c8_kept_prefixes_refuse_no_request() -> None:
    rig = Rig(num_pages=16, pinned_cache_fraction=1.0)
    for i in range(4):
        ask(rig, [100 * i + j for j in range(12)], RetentionRequest(12, 3600.0))
    assert rig.scheduler.pools.cache.retention.num_pages == 12
    large = rig.add(40, max_new=24)
    rig.run()
    assert rig.finish_of(large) is FinishReason.LENGTH
    assert rig.scheduler.state(0.0).counters["prefixes_given_up"] == 4


@pytest.mark.parametrize(
    "kinds", [kind_config(num_slots=20), kind_config(num_window_pages=24, window=8)], ids=["states", "windows"]
)
def test_c8_kept_states_and_windows_refuse_no_request(kinds: Any) -> None:
    rig = Rig(kinds=kinds, pinned_cache_fraction=1.0, max_running_requests=2, chunked_prefill_size=16, num_pages=96)
    for i in range(24):
        ask(rig, [100 * i + j for j in range(9)], RetentionRequest(8, 3600.0))
    last = [rig.add(9, max_new=8) for _ in range(2)]
    rig.run()
    assert {rig.finish_of(req) for req in last} == {FinishReason.LENGTH}
    assert rig.scheduler.state(0.0).counters["prefixes_given_up"] > 0


@pytest.mark.parametrize(
    "kinds",
    [
        kind_config(num_slots=40),
        kind_config(num_window_pages=80, window=8),
        kind_config(num_slots=40, num_window_pages=80, window=8),
    ],
    ids=["states", "windows", "both"],
)
def test_kept_prefix_has_what_other_kinds_need_to_resume(kinds: Any) -> None:
    rig = Rig(kinds=kinds, pinned_cache_fraction=0.5, max_running_requests=2)
    prompt = [*PROMPT, 16]
    assert kept(rig, ask(rig, prompt, RetentionRequest(17, 300.0))) == (16, 300.0, "")
    fill(rig, 40)
    assert found(rig, prompt)[0] == 16


def test_flush_ends_what_is_kept() -> None:
    rig = Rig()
    ask(rig, PROMPT, RetentionRequest(16, 300.0))
    rig.scheduler.flush_cache()
    assert rig.scheduler.pools.cache.retention.num_pages == 0
    assert found(rig, PROMPT)[0] == 0


def test_c25_sleep_ends_what_is_kept_unless_the_cache_outlasts_it() -> None:
    for keeps in (False, True):
        rig = Rig(kinds=kind_config(slot_bytes={"kv": 1}, retraction_host_bytes=1 << 20))
        ask(rig, PROMPT, RetentionRequest(16, 300.0))
        assert Halt(rig.scheduler, Mode.WAIT).done
        (keep_cached if keeps else forget_caches)(rig.scheduler, rig.now)
        resume(rig.scheduler, 100.0)
        rig.now = 100.0
        assert rig.scheduler.pools.cache.retention.num_pages == 4 * keeps
        fill(rig)
        assert found(rig, PROMPT)[0] == 16 * keeps


def test_c32_tenant_keeps_no_more_than_its_share() -> None:
    rig = Rig(tenants={"a": 1, "b": 2})
    assert kept(rig, ask(rig, PROMPT, RetentionRequest(16, 300.0), tenant="a")) == (16, 300.0, "")
    assert kept(rig, ask(rig, 16, RetentionRequest(16, 300.0), tenant="a"))[2] == NotKept.OVER_LIMIT
    assert kept(rig, ask(rig, 16, RetentionRequest(16, 300.0), tenant="b")) == (16, 300.0, "")


def test_prompt_logprobs_change_nothing_about_what_is_kept() -> None:
    rig = Rig()
    params = SamplingParams(max_tokens=2, stop_token_ids=(7,), prompt_logprobs=1)
    assert kept(rig, ask(rig, PROMPT, RetentionRequest(16, 300.0), params=params)) == (16, 300.0, "")


def test_c25_kept_prefix_whose_time_is_over_is_no_better_than_others_when_an_idle_engine_sleeps() -> None:
    rig = Rig(kinds=kind_config(slot_bytes={"kv": 1}, retraction_host_bytes=1 << 20))
    ask(rig, PROMPT, RetentionRequest(16, 300.0))
    sleeper = Sleeper(rig.scheduler, NoMemory(), lambda: 300.0, keep_prefix_cache=True)
    sleeper.sleep()
    assert not [*rig.scheduler.pools.cache.retention]
