"""What the simulator found, each reduced to a few calls."""

from random import Random

import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, TokenLogprob
from forebay.requests.updates import FinishReason
from tests.kinds_of import states_of, windows_of
from tests.scheduler.rig import Rig
from tests.simulation.oracles import Tracked
from tests.simulation.rig import Scripted, greedy, hybrid, simulation_of
from tests.simulation.simulator import run_seed
from tests.simulation.workload import Faults, Traffic


def test_a_row_handed_out_again_at_once_has_no_writes_of_its_last_tenant() -> None:
    """A device may let either of two writes to one entry win."""
    rig = Rig()
    for _ in range(2):  # side by side: the second's row turns to the first's pages as both end
        rig.add(list(range(12)), max_new=1)
    rig.step()
    rig.add(list(range(50, 60)))
    rig.step()
    plan = rig.plans[-1]
    written = list(zip(plan.writes.write_rows.tolist(), plan.writes.write_columns.tolist(), strict=True))
    assert len(written) == len(set(written)) == 3


def retract_last(rig: Rig) -> None:
    rig.scheduler.preemption.retract(rig.scheduler.queues.victim)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_retracted_while_two_steps_compute_for_it_ends_when_the_first_of_them_fails(depth: int) -> None:
    """It used to go on with the second step's token, which follows one that is lost."""
    rig = Rig(depth=depth)
    req = rig.add(3)
    for _ in range(depth):
        rig.launch()
    retract_last(rig)
    (update,) = rig.fail(EngineError("broken"))
    assert (update.request_id, update.finish) == (req.id, FinishReason.ERROR)
    rig.flights.clear()  # void
    assert rig.scheduler.idle


@pytest.mark.parametrize("in_flight", [False, True])
def test_prompt_logprobs_are_whole_after_a_retraction_before_the_first_token(in_flight: bool) -> None:
    rig = Rig(chunked_prefill_size=4, depth=1)
    rig.add([1, 2, 3, 4], params=SamplingParams(max_tokens=2, prompt_logprobs=0))

    def about(*tokens: int | None) -> dict[int, list[TokenLogprob | None]]:
        return {0: [TokenLogprob(token, -1.0, 1) if token else None for token in tokens]}

    rig.launch()
    rig.commit(prompt_logprobs=about(2, 3))
    if in_flight:
        rig.launch()  # the last chunk: its token arrives after the retraction
        retract_last(rig)
    else:
        retract_last(rig)
        rig.launch()
        assert rig.commit(prompt_logprobs=about(2, 3)) == []
        rig.launch()
    (update,) = rig.commit(prompt_logprobs=about(4, None))
    assert update.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in update.prompt_logprobs] == [None, 2, 3, 4]


def lose_writes(plan: StepPlan, part: float) -> None:
    """Make none of the writes of a launch that fails."""


def test_row_writes_that_a_failed_launch_swallowed_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may carry the row writes of a request that sits the step out; it lives on when the step fails."""
    sim = Scripted(
        SchedulerConfig(
            page_size=4,
            num_pages=7,
            max_running_requests=2,
            context_length=64,
            schedule_conservativeness=0.01,
            overlap_depth=1,
            ledger=Ledger.RAISE,
        ),
        Traffic(num_requests=0, arrivals=0.0, vocab=1000, longest_prompt=11, longest_output=6),
        Random(0),
    )
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first, second = (sim.accept(range(11), params) for _ in range(2))
    sim.turn()
    sim.turn()  # the first chunks commit: the second request's pages give way to the first one's
    sim.faults = Faults(launch_fails=1.0)
    monkeypatch.setattr(sim.runner, "launch_in_part", lose_writes)
    sim.turn()  # pages are short until they are released, so the second request waits a step
    sim.drain()
    assert (first.finish, second.finish) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_window_writes_that_a_failed_launch_swallowed_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache took windows over from a request; whoever goes on from them is another one, after the failure."""
    sim = simulation_of(hybrid("windows"))
    prompt = list(range(30))
    sim.add(prompt, greedy(1))
    sim.drain()
    windows = windows_of(sim.scheduler.pools)
    windows.in_tree.evict(windows.num_cached)
    again = sim.accept(prompt, greedy(8))
    while not again.received:
        sim.turn()
    sim.faults = Faults(launch_fails=1.0)
    monkeypatch.setattr(sim.runner, "launch_in_part", lose_writes)
    sim.turn()
    sim.faults = Faults()
    third = sim.accept(prompt, greedy(4))
    sim.drain()
    assert (again.finish, again.cached_tokens, third.cached_tokens) == (FinishReason.ERROR, 0, 28)


def coming_back(depth: int) -> tuple[Scripted, Tracked]:
    """A request that was offloaded, in the step in flight that loads it; the cache has nothing of it left."""
    sim = simulation_of(hybrid("windows", overlap_depth=depth, host=True))
    sim.add([50], greedy(60))  # somebody for whom there are steps meanwhile
    tracked = sim.accept(list(range(13)), greedy(20))
    while len(tracked.received) < 3:
        sim.turn()
    while sim.flights:
        sim.land()
    sim.scheduler.every = 1
    assert sim.launched().host.saves
    sim.scheduler.every = 0
    sim.scheduler.flush_cache()
    sim.land()
    while not sim.launched().host.loads:
        sim.land()
    return sim, tracked


@pytest.mark.parametrize("depth", [0, 1])
def test_the_cache_adopts_what_comes_back_from_the_host_only_when_it_is_there(depth: int) -> None:
    sim, tracked = coming_back(depth)
    sim.abort(tracked.id)
    sim.oracles.check_cache()
    sim.runner.check_in_flight()
    sim.drain()


def test_a_copy_on_the_host_goes_when_the_step_that_was_to_load_it_fails() -> None:
    sim, tracked = coming_back(0)
    sim.fail()
    sim.drain()  # which finds what the host still has
    assert tracked.finish is FinishReason.LENGTH


def test_the_cache_report_is_about_the_cache_that_was_asked() -> None:
    """Admission may evict what the prompt was compared with."""
    sim = simulation_of(hybrid("extra_buffer", page_size=1, num_tokens=24, spare_slots=1, max_running_requests=1))
    sim.add([1, 2, 3, 4, 5, 6], greedy(1))
    sim.drain()
    states_of(sim.scheduler.pools).in_tree.evict(3)
    other = sim.accept([1, 2, 9, *range(10, 30)], greedy(1))
    sim.drain()
    report = other.report
    assert report is not None
    assert (report.kv_tokens, report.differs_at, report.token_here, report.token_there) == (2, 2, 9, 3)


@pytest.mark.parametrize("seed", [549, 732])
def test_a_window_slides_for_one_that_has_ended_and_whose_state_is_still_being_written(seed: int) -> None:
    """Nobody runs in its row any more, but what it holds is there until its last step has committed."""
    run_seed(seed)
