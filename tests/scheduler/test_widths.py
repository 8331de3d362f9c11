"""Decodes of several tokens: guesses are planned within the bounds, and only what was accepted counts (C12, C16)."""

from collections.abc import Sequence

import numpy as np
import pytest

from forebay.base.errors import EngineError
from forebay.memory.holding import Outrun
from forebay.requests.request import Request
from forebay.requests.step_plan import StepResult
from forebay.requests.updates import FinishReason
from tests.kinds_of import kind_config, states_of
from tests.scheduler.rig import Rig

RIGHT, WRONG = 1000, 999


class Says:
    """A proposer that says the same tokens each time."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.asked, self.gone = tokens, [], []

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        self.asked.append((req.id, len(req.tokens), most))
        return self.tokens[:most]

    def ended(self, req: Request) -> None:
        self.gone.append(req.id)


def told(rig: Rig, req: Request) -> list[int]:
    """How many tokens each update of the request brought."""
    return [len(update.token_ids) for update in rig.updates if update.request_id == req.id]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("tokens", [(), (RIGHT,), (RIGHT, WRONG, RIGHT), (WRONG,) * 3, (RIGHT,) * 3])
def test_c16_tokens_are_the_same_whatever_is_guessed(tokens, page_size):
    rig = Rig(width=4, proposer=Says(*tokens), page_size=page_size)
    reqs = [rig.add(n, max_new=11) for n in (5, 7, 16)]
    rig.run()
    right = next((i for i, token in enumerate(tokens) if token != RIGHT), len(tokens))
    for req in reqs:
        assert rig.tokens_of(req) == [RIGHT] * 11
        assert told(rig, req)[:2] == [1, 1 + right]
        assert rig.finish_of(req) is FinishReason.LENGTH
    counters = rig.scheduler.counters
    assert counters["accepted_tokens"] == sum(n - 1 for req in reqs for n in told(rig, req))
    partly = [update.num_partly_accepted for update in rig.updates if update.finish]
    assert counters["partly_accepted_drafts"] == sum(partly)
    # The width leaves three draft tokens: (RIGHT, WRONG, RIGHT) alone has a rejection behind an accepted one.
    assert all(partly) if tokens == (RIGHT, WRONG, RIGHT) else not any(partly)
    assert rig.free_pages + rig.scheduler.pools.cache.num_pages == 64


def test_nobody_is_asked_for_more_than_may_come():
    proposer = Says(*[WRONG] * 9)
    rig = Rig(width=4, proposer=proposer)
    rig.add(5, max_new=4)
    rig.run()
    assert proposer.asked == [(1, 6, 2), (1, 7, 1)], "the last token has no guess behind it"
    assert [plan.q_lens.tolist() for plan in rig.plans] == [[5], [3], [2], [1]]
    assert proposer.gone == [1]


def test_steps_with_prompts_decode_one_token():
    rig = Rig(width=4, proposer=Says(RIGHT, RIGHT), chunked_prefill_size=4)
    rig.add(3, max_new=9)
    rig.step()
    rig.add(6, max_new=2)
    assert [rig.step().q_lens.tolist() for _ in range(3)] == [[4, 1], [2, 1], [3, 1]]


@pytest.mark.parametrize("at", range(5))
def test_what_follows_a_stop_token_among_the_accepted_is_not_told_counted_or_cached(at):
    tokens = [RIGHT] * at + [7] + [RIGHT] * (4 - at)

    class Knows(Says):
        def propose(self, req, most):
            return tokens[len(req.tokens) - 4 :][:most]

    rig = Rig(width=5, proposer=Knows(), page_size=1)
    req = rig.add(4, max_new=20)
    rig.launch()
    rig.scheduler.commit(plan := rig.flights.popleft(), result(plan, [tokens[0]]), 0.0)
    if at:
        plan = rig.launch()
        assert plan.drafts.tolist() == tokens[1:5]
        rig.scheduler.commit(rig.flights.popleft(), result(plan, [*tokens[1:], RIGHT]), 0.0)
    rig.updates += rig.scheduler.take_updates()
    rig.scheduler.audit()
    assert rig.tokens_of(req) == tokens[: at + 1]
    assert (rig.finish_of(req), rig.updates[-1].matched_stop) == (FinishReason.STOP, 7)
    assert rig.scheduler.counters["generated_tokens"] == at + 1
    again = rig.add([*range(100, 104), *tokens, 5], max_new=1)
    rig.step()
    assert again.cache_report.cached_tokens <= 4 + at + 1


def result(plan, tokens):
    return StepResult(token_ids=tokens, num_new=[len(tokens)] if plan.width > 1 else None)


@pytest.mark.parametrize(
    ("tokens", "told", "finish"),
    [
        ([0], [], FinishReason.ERROR),
        ([5, 6, 0], [5, 6], FinishReason.ERROR),
        ([5, 7, 6, 0], [5, 7], FinishReason.STOP),
        ([5, 6, 4, 0], [5, 6, 4], FinishReason.LENGTH),
    ],
)
def test_c30_failing_request_returns_the_same_tokens_with_and_without_drafts(tokens, told, finish):
    """And nothing of the step is kept, though it ended before."""
    rig = Rig(width=4, proposer=Says(5, 6, 4), page_size=1)
    req = rig.add(4, max_new=4)
    rig.step()
    rig.launch()
    result = StepResult(token_ids=tokens, num_new=[len(tokens)], failed=(0,))
    rig.scheduler.commit(rig.flights.popleft(), result, 0.0)
    rig.updates += rig.scheduler.take_updates()
    rig.scheduler.audit()
    assert (rig.tokens_of(req), rig.finish_of(req)) == ([RIGHT, *told], finish)
    assert (rig.updates[-1].failure is None) is (finish is not FinishReason.ERROR)
    assert rig.scheduler.pools.cache.num_pages == 4
    assert rig.free_pages == 60


def test_guesses_never_make_anybody_give_way():
    """Both fit without guesses, not with them."""
    rig = Rig(width=4, proposer=Says(WRONG, WRONG, WRONG), page_size=1, num_pages=24, radix_cache=False)
    reqs = [rig.add(5, max_new=8) for _ in range(2)]
    rig.run()
    assert [rig.tokens_of(req) for req in reqs] == [[RIGHT] * 8] * 2
    assert rig.scheduler.counters["retractions"] == 0


def test_guesses_end_with_the_pages_of_their_rows_where_there_are_no_more():
    rig = Rig(width=4, proposer=Says(WRONG, 5, 6), page_size=4, num_pages=4, schedule_conservativeness=0.01)
    reqs = [rig.add(n, max_new=5) for n in (6, 5)]
    rig.step()
    assert (rig.free_pages, rig.scheduler.pools.cache.num_evictable) == (0, 0)
    plan = rig.step()
    assert plan.q_lens.tolist() == [2, 3]
    assert plan.drafts.tolist() == [WRONG, WRONG, 5]
    rig.run()
    assert [rig.tokens_of(req) for req in reqs] == [[RIGHT] * 5] * 2
    assert rig.scheduler.counters["draft_tokens"] == sum(
        (plan.q_lens[plan.num_extends :] - 1).sum() for plan in rig.plans
    )


def test_a_full_cache_makes_room_for_guesses_as_for_tokens():
    rig = Rig(width=4, proposer=Says(WRONG, 5, 6), page_size=1, num_pages=24)
    rig.add(15, max_new=1)
    rig.run()
    rig.add(9, max_new=6)
    rig.step()
    cache = rig.scheduler.pools.cache
    assert (rig.free_pages, cache.num_evictable) == (0, 15)
    assert rig.step().q_lens.tolist() == [4]
    assert cache.num_evicted_pages >= 4


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 22), (4, 6)])
def test_pages_that_wrong_guesses_were_given_go_back_before_anybody_gives_way(page_size, num_pages):
    """One of two guesses, and both end before the memory does."""

    class OneSays(Says):
        def propose(self, req, most):
            return self.tokens[:most] if req.id == 1 else ()

    token = [RIGHT]
    sizes = {"page_size": page_size, "num_pages": num_pages, "radix_cache": False, "schedule_conservativeness": 0.0}
    rig = Rig(sample=lambda row: token[0], width=8, proposer=OneSays(*[WRONG] * 7), **sizes)
    reqs = [rig.add(5, max_new=16) for _ in range(2)]
    for _ in range(5):
        rig.step()
        named = np.count_nonzero(rig.scheduler.pools.rows.req_to_token, axis=1)
        assert named.tolist() == rig.scheduler.pools.table.num_pages.tolist()
    token[0] = 7
    rig.run()
    assert [rig.tokens_of(req) for req in reqs] == [[RIGHT] * 5 + [7]] * 2
    assert rig.scheduler.counters["retractions"] == 0
    assert rig.free_pages == num_pages


@pytest.mark.parametrize("tokens", [(RIGHT,) * 5, (RIGHT, WRONG), (WRONG,)])
def test_c18_a_state_is_tracked_at_its_length_however_far_a_step_goes(tokens):
    kinds = kind_config(num_slots=32, track_interval=8)
    rig = Rig(width=6, proposer=Says(*tokens), kinds=kinds)
    req = rig.add(5, max_new=30)
    while req.maybe_allocation is None or req.num_output < 20:
        rig.step()
    tracking = states_of(rig.scheduler.pools).tracking(req.allocation)
    rig.launch()
    tracking.complete(rig.scheduler.pools.steps.committed, req.allocation.kv_committed)
    assert tracking.tracked.length == req.allocation.kv_committed // 8 * 8
    rig.commit()
    rig.run()


def test_c12_while_a_step_that_guesses_is_in_flight_nobody_knows_the_length():
    rig = Rig(width=4, proposer=Says(RIGHT, WRONG))
    req = rig.add(5, max_new=8)
    rig.step()
    rig.launch()
    assert (req.allocation.kv_bound, req.allocation.kv_committed) == (8, 5)
    with pytest.raises(Outrun):
        _ = rig.scheduler.queues.running.seq_lens_cpu
    assert rig.scheduler.plan(0.0, 4) is None, "who guesses has to know the last token"
    rig.commit()
    assert rig.scheduler.queues.running.seq_lens_cpu.tolist() == [7]


def test_c18_a_tracked_state_that_was_overwritten_behind_the_end_is_given_to_nobody():
    """The accepted tokens come to a length that the stop token among them is before: the only slot for tracked states
    has the one of that length by then."""
    token, proposer = [RIGHT], Says()
    kinds = kind_config(num_slots=24, track_interval=4)
    rig = Rig(sample=lambda row: token[0], width=4, proposer=proposer, kinds=kinds)
    req = rig.add(list(range(9)), max_new=30)
    for _ in range(5):
        rig.step()
    token[0], proposer.tokens = 7, (7, 7, 7)
    plan = rig.step()
    assert (plan.q_lens.tolist(), plan.kinds.state.snap_lens.tolist(), rig.finish_of(req)) == (
        [4],
        [16],
        FinishReason.STOP,
    )
    turn = rig.add([*range(9), *rig.tokens_of(req), 60], max_new=1)
    rig.run()
    assert turn.cache_report.cached_tokens == 8


def test_c27_on_trial_nobody_guesses():
    """What failed may be the guesses' fault alone."""
    rig = Rig(width=4, proposer=Says(WRONG, WRONG, WRONG))
    reqs = [rig.add(5, max_new=8) for _ in range(2)]
    rig.step()
    assert rig.launch().width == 4
    rig.fail(EngineError("no"))
    while rig.scheduler.queues.suspects.groups:
        assert rig.launch().width == 1
        rig.commit()
    rig.run()
    assert [rig.tokens_of(req) for req in reqs] == [[RIGHT] * 8] * 2
