"""What the scheduler decides, one behaviour at a time; the simulator covers what they do together."""

from array import array

import pytest

from forebay.base.errors import EngineError, InvalidRequest, Overloaded, RequestTooLarge
from forebay.config.engine_config import Ledger, SchedulePolicy
from forebay.memory.slots import LedgerError
from forebay.requests.request import Status
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import FinishReason, MissReason
from tests.scheduler.rig import Rig

# -- on arrival -------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        Rig().add([])


def test_a_request_id_cannot_be_used_twice_at_once():
    rig = Rig()
    req = rig.add(3)
    with pytest.raises(InvalidRequest, match="in use"):
        rig.scheduler.add(req, 0.0)


def test_more_than_the_context_is_refused_with_the_numbers():
    with pytest.raises(RequestTooLarge, match="60 tokens and max_tokens is 5, together 65; the context holds 64"):
        Rig().add(60, max_new=5)


def test_what_can_never_fit_the_pool_is_refused_with_the_numbers_and_what_just_fits_runs():
    with pytest.raises(RequestTooLarge, match="5 KV pages of 4 tokens and there are 4") as caught:
        Rig(num_pages=4).add(10, max_new=8)
    assert caught.value.code == "kv_capacity_exceeded"
    rig = Rig(num_pages=4)
    req = rig.add(10, max_new=7)
    rig.run()
    assert len(rig.tokens_of(req)) == 7


def test_the_queue_is_capped_in_requests():
    rig = Rig(max_running_requests=2, max_queued_requests=3)
    for _ in range(5):
        rig.add(3)
    with pytest.raises(Overloaded, match="5 requests run or wait; at most 5 are taken"):
        rig.add(3)
    rig.run()
    rig.add(3)


def test_the_queue_is_capped_in_tokens_but_one_request_may_always_wait():
    rig = Rig(max_queued_tokens=10)
    rig.add(20)
    with pytest.raises(Overloaded, match=r"of the 10 prompt tokens that may be queued .* fewer are left than the 3"):
        rig.add(3)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_into_chunks_and_only_the_last_one_samples():
    rig = Rig(chunked_prefill_size=4)
    req = rig.add(10, max_new=2)
    masks = [(plan.q_lens.tolist(), plan.sample_mask.tolist()) for plan in iter(rig.step, None)]
    assert masks == [([4], [False]), ([4], [False]), ([2], [True]), ([1], [True])]
    assert rig.tokens_of(req) == [1000, 1000]
    assert rig.finish_of(req) is FinishReason.LENGTH


def test_chunks_and_decodes_share_a_step():
    rig = Rig(chunked_prefill_size=4)
    rig.add(3, max_new=5)
    rig.step()
    rig.add(6)
    plan = rig.step()
    assert (plan.num_extends, plan.num_decodes, plan.num_tokens) == (1, 1, 5)
    assert (plan.starts.tolist(), plan.ends.tolist()) == ([0], [4])


def test_prompts_are_cut_shorter_while_others_decode_so_that_those_wait_less():
    rig = Rig(chunked_prefill_size=16, mixed_chunk_size=5)
    rig.add(3, max_new=3)
    rig.step()
    rig.add(18)
    lengths = [(plan.num_decodes, plan.q_lens[: plan.num_extends].tolist()) for plan in iter(rig.step, None)]
    assert lengths[:4] == [(1, [5]), (1, [5]), (0, [8]), (1, [])]


@pytest.mark.parametrize(("limit", "mixed"), [(3, 3), (1, 1), (8, 5)])
def test_scheduler_mixed_limit_cuts_prompts_only_beside_decodes(limit, mixed):
    rig = Rig(chunked_prefill_size=16, mixed_chunk_size=5)
    rig.mixed_limit = limit
    rig.add(18, max_new=9)
    rig.add(30)
    lengths = [(plan.num_decodes, plan.q_lens[: plan.num_extends].tolist()) for plan in iter(rig.step, None)]
    assert lengths[0] == (0, [16])
    cut = [chunk for decodes, chunk in lengths if decodes and chunk]
    assert cut[0] == [mixed]
    assert all(sum(chunk) <= mixed for chunk in cut)


def test_a_stop_token_ends_a_request_and_is_named():
    rig = Rig(sample=lambda row: 7)
    req = rig.add(3)
    rig.run()
    assert (rig.finish_of(req), rig.updates[-1].matched_stop) == (FinishReason.STOP, 7)


def test_row_writes_tell_the_device_every_page_exactly_once():
    rig = Rig(page_size=2)
    rig.add(3, max_new=6)
    rig.run()
    written = [w for plan in rig.plans for w in zip(plan.writes.write_rows, plan.writes.write_columns, strict=True)]
    assert written == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_admissions_carry_the_tokens_that_penalties_count():
    rig = Rig()
    req = rig.add([5, 6, 7])
    (admission,) = rig.step().admissions
    assert (admission.row, admission.request_id, admission.num_prompt) == (1, req.id, 3)
    assert admission.token_ids.tolist() == [5, 6, 7]


def test_with_nothing_to_do_there_is_no_plan():
    assert Rig().launch() is None


# -- order ------------------------------------------------------------------------------------------------------------


def started(rig: Rig) -> list[int]:
    return [admission.request_id for plan in rig.plans for admission in plan.admissions]


def test_fcfs_starts_in_the_order_of_submission():
    rig = Rig(max_running_requests=1)
    for priority in (0, 5, 1):
        rig.add(3, priority=priority)
    rig.run()
    assert started(rig) == [1, 2, 3]


def test_priority_starts_the_highest_first():
    rig = Rig(max_running_requests=1, schedule_policy=SchedulePolicy.PRIORITY)
    for priority in (0, 5, 1):
        rig.add(3, priority=priority)
    rig.run()
    assert started(rig) == [2, 3, 1]


def test_lpm_starts_the_longest_cached_prefix_first():
    rig = Rig(max_running_requests=1, schedule_policy=SchedulePolicy.LPM)
    rig.add(list(range(20)))
    rig.run()
    rig.add([90, 91])
    rig.add([*range(8), 90])
    rig.add([*range(16), 91])
    rig.run()
    assert started(rig) == [1, 4, 3, 2]


def test_a_request_that_does_not_fit_is_overtaken_but_not_for_ever():
    rig = Rig(num_pages=14, schedule_conservativeness=1.0, max_queued_requests=400, radix_cache=False)
    rig.add(4, max_new=36)  # keeps running
    rig.step()
    big = rig.add(40, max_new=8)  # 12 pages: must wait
    behind = []
    while big.status is Status.WAITING and len(behind) < 200:
        behind.append(rig.add(2, max_new=1))
        rig.step()
        if rig.scheduler.requests.get(1) is None:
            rig.add(4, max_new=36)
    assert behind[0].status is Status.FINISHED
    rig.run()
    assert rig.finish_of(big) is FinishReason.LENGTH


def test_after_its_share_of_overtaking_everybody_waits_for_the_head():
    rig = Rig(num_pages=12, max_queued_requests=400, radix_cache=False, max_running_requests=4)
    rig.add(4, max_new=40)
    rig.step()
    big = rig.add(40, max_new=8)
    big.overtaken = 64
    later = rig.add(2, max_new=1)
    rig.step()
    assert (big.status, later.status) == (Status.WAITING, Status.WAITING)
    rig.run()
    assert started(rig) == [1, 2, 3]


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_abort_ends_a_request_wherever_it_is_and_frees_its_memory(steps):
    rig = Rig(chunked_prefill_size=4, radix_cache=False)
    req = rig.add(10)
    for _ in range(steps):
        rig.step()
    (update,) = rig.abort(req.id)
    assert update.finish is FinishReason.ABORT
    assert rig.abort(req.id) == []
    assert rig.scheduler.idle
    assert rig.free_pages == 64


def test_abort_is_by_exact_id():
    rig = Rig()
    for _ in range(12):
        rig.add(3)
    (update,) = rig.abort(1)
    assert update.request_id == 1
    assert sorted(rig.scheduler.requests) == list(range(2, 13))
    assert rig.abort(99) == []


@pytest.mark.parametrize(
    ("limits", "running", "message"),
    [
        (
            {"queue_timeout_s": 5.0, "max_running_requests": 7, "page_size": 4, "num_pages": 64},
            False,
            "queued for 10.0 s; the limit is 5 s (--queue-timeout). 7 run at once (--max-running-requests), and it may "
            "come to 6 of the 256 tokens that fit into the KV cache (--max-total-tokens): lower max_tokens",
        ),
        ({"request_timeout_s": 5.0}, True, "took 10.0 s; the limit is 5 s"),
        ({"stall_timeout_s": 5.0}, True, "no token for 10.0 s; the limit is 5 s"),
    ],
)
def test_a_request_that_takes_too_long_ends_with_a_typed_error(limits, running, message):
    rig = Rig(**limits)
    req = rig.add(3)
    if running:
        rig.step()
    assert rig.expire(4.0) == []
    (update,) = rig.expire(10.0)
    assert (update.request_id, update.finish, update.failure.kind) == (req.id, FinishReason.ERROR, "RequestTimeout")
    assert message in update.failure.message
    assert rig.scheduler.idle


def test_a_failed_step_ends_its_requests_and_nobody_elses():
    rig = Rig(max_running_requests=1)
    first, second = rig.add(3), rig.add(3)
    rig.launch()
    updates = rig.fail(EngineError("broken"))
    assert [(u.request_id, u.failure.message) for u in updates] == [(first.id, "broken")]
    rig.run()
    assert rig.finish_of(second) is FinishReason.LENGTH


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_collected_over_chunks_and_come_with_the_first_token():
    rig = Rig(chunked_prefill_size=4)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    rig.add([1, 2, 3, 4], params=params)
    rig.run()
    rig.add([1, 2, 3, 4], params=params)

    def about(*tokens):
        return [TokenLogprob(t, -1.0, 1) if t else None for t in tokens]

    assert rig.launch().prompt_logprobs == (0,)
    assert rig.commit(prompt_logprobs={0: about(2, 3)}) == []
    rig.launch()
    chosen = TokenLogprob(1000, -0.5, 1)
    (update,) = rig.commit(prompt_logprobs={0: about(4, None)}, logprobs=[chosen])
    assert [e and e.token_id for e in update.prompt_logprobs] == [None, 2, 3, 4]
    assert update.logprobs == [chosen]
    assert update.cache.miss_reason is MissReason.PROMPT_LOGPROBS


@pytest.mark.parametrize(("budget", "scored", "plain"), [(1, 1, 0), (2, 1, 0), (8, 4, 0), (64, 20, 24)])
def test_scheduler_scored_prompt_uses_twice_its_tokens_of_the_budget(budget, scored, plain):
    rig = Rig(chunked_prefill_size=budget)
    rig.add(20, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    rig.add(40)
    plan = rig.launch()
    assert plan.q_lens.tolist() == [count for count in (scored, plain) if count]
    assert plan.prompt_logprobs == (0,)


# -- looking after itself ---------------------------------------------------------------------------------------------


def test_the_state_accounts_for_every_page_and_row():
    rig = Rig(num_pages=300)
    rig.add(12)
    rig.run()
    rig.add(5, max_new=8)
    rig.step()
    for _ in range(8):
        rig.add(3)
    state = rig.scheduler.state(now=2.0)
    for pool in state.pools:
        assert pool.free + pool.running + pool.cached + pool.quarantined == pool.total
    kv, rows = state.pools
    assert (kv.running, kv.cached, rows.running) == (1, 4, 1)
    assert (state.num_running, state.num_waiting, state.num_waiting_tokens, state.oldest_wait_s) == (1, 8, 24, 2.0)
    assert len(state.map) == 256
    assert set(state.map) == {0, 1, 2}
    assert state.counters["generated_tokens"] == 5


def test_a_leak_is_quarantined_and_counted_and_the_engine_goes_on():
    rig = Rig(ledger=Ledger.COUNT)
    rig.scheduler.pools.kv.take_ids(2, 77)
    with pytest.raises(LedgerError, match="booked for request 77"):
        rig.scheduler.audit()
    assert rig.scheduler.reclaim_leaks() == 2
    rig.scheduler.audit()
    assert rig.scheduler.state(0.0).pools[0].quarantined == 2
    assert rig.scheduler.reclaim_leaks() == 0
    req = rig.add(12)
    rig.run()
    assert rig.finish_of(req) is FinishReason.LENGTH


def test_the_last_update_says_how_often_a_request_was_retracted_and_what_was_computed_again():
    rig = Rig(page_size=4, num_pages=12)
    req, other = rig.add(16, max_new=8), rig.add(16, max_new=2)
    rig.step()
    rig.step()
    rig.scheduler.preemption.retract(req)
    rig.run()
    (told,) = [update.memory for update in rig.updates if update.request_id == req.id and update.finish]
    assert (told.retractions, told.recomputed_tokens) == (1, rig.scheduler.counters["recomputed_tokens"])
    assert told.recomputed_tokens > 0
    assert [update.memory for update in rig.updates if update.request_id == other.id and update.finish] == [None]


def test_tokens_that_find_no_memory_are_neither_appended_nor_sent():
    class Full(array):
        def fromlist(self, values):
            raise MemoryError

    rig = Rig()
    req = rig.add(3)
    rig.scheduler.take_updates()
    req.tokens = Full("i", req.tokens)
    with pytest.raises(MemoryError):
        rig.scheduler.outputs.append(req, [5, 6], None, 1.0)
    assert rig.scheduler.take_updates() == []
    assert (req.num_output, req.account.generated_tokens, req.account.service) == (0, 0, 0)
