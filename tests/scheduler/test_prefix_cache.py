"""What the scheduler leaves in the prefix cache and finds there, and what it says of it."""

import pytest

from forebay.requests.updates import FinishReason, MissReason
from tests.kinds_of import kind_config
from tests.scheduler.rig import Rig


def test_c20_the_first_update_says_what_was_cached_and_why_not_more():
    rig = Rig(page_size=4)
    rig.add(list(range(12)))
    rig.run()
    rig.add([*range(10), *[99] * 6])
    rig.run()
    reports = [u.cache for u in rig.updates if u.cache]
    assert [(r.cached_tokens, r.miss_reason) for r in reports] == [(0, MissReason.EMPTY), (8, MissReason.DIVERGED)]


def test_what_was_generated_is_cached_too_but_not_the_last_token():
    rig = Rig(page_size=1)
    first = rig.add([1, 2, 3], max_new=4)
    rig.run()
    rig.add([*first.tokens, 50])
    rig.run()
    assert [u.cache.cached_tokens for u in rig.updates if u.cache] == [0, 6]


def test_the_same_prompt_at_the_same_time_is_computed_once():
    rig = Rig(page_size=4, chunked_prefill_size=16)
    prompt = list(range(48))
    for _ in range(3):
        rig.add(prompt, max_new=3)
    rig.run()
    assert [u.cache.cached_tokens for u in rig.updates if u.cache] == [0, 44, 44]


def test_requests_that_were_computed_side_by_side_end_with_one_copy_in_the_cache():
    rig = Rig(page_size=4)
    prompt = list(range(12))  # too short to wait for
    rig.add(prompt, max_new=2)
    rig.add(prompt, max_new=2)
    rig.run()
    assert rig.scheduler.pools.cache.num_pages == 3
    assert rig.free_pages == 61


def test_namespaces_do_not_share():
    rig = Rig()
    for namespace in ("a", "b", "a"):
        rig.add(list(range(12)), namespace=namespace)
        rig.run()
    assert [u.cache.cached_tokens for u in rig.updates if u.cache] == [0, 0, 8]


def test_without_the_radix_cache_nothing_is_kept_and_the_report_says_so():
    rig = Rig(radix_cache=False)
    for _ in range(2):
        rig.add(list(range(12)))
        rig.run()
    reasons = {u.cache.miss_reason for u in rig.updates if u.cache}
    assert reasons == {MissReason.DISABLED}
    assert rig.free_pages == 64


def test_a_request_that_failed_leaves_nothing_in_the_cache():
    rig = Rig()
    req = rig.add(12)
    rig.launch()
    (update,) = rig.commit(failed=(0,))
    assert (update.finish, update.failure.kind, update.failure.code) == (
        FinishReason.ERROR,
        "NumericalError",
        "non_finite_logits",
    )
    assert rig.finish_of(req) is FinishReason.ERROR
    assert rig.scheduler.pools.cache.num_pages == 0
    assert rig.free_pages == 64


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunk_that_is_not_finite_is_not_adopted_though_nothing_was_sampled_from_it(depth):
    """C30: what earlier chunks left has been looked at and stays; this one and what was launched behind it go."""
    rig = Rig(depth=depth, chunked_prefill_size=8)
    req = rig.add(40)
    rig.step()
    rig.step()
    while depth and len(rig.flights) > 1:
        rig.commit()
    adopted = rig.scheduler.pools.cache.num_pages
    assert adopted == 2 * (2 - depth)
    if depth == 0:
        rig.launch()
    rig.launch()
    (update,) = rig.commit(failed=(0,))
    assert (update.finish, update.failure.code, update.token_ids) == (FinishReason.ERROR, "non_finite_logits", [])
    rig.run()
    assert rig.finish_of(req) is FinishReason.ERROR
    assert rig.scheduler.pools.cache.num_pages == adopted
    again = rig.add(req.tokens.tolist())
    rig.run()
    assert rig.finish_of(again) is FinishReason.LENGTH
    assert next(u.cache.cached_tokens for u in rig.updates if u.cache and u.request_id == 2) == adopted * 4


def test_a_retracted_request_whose_chunk_turns_out_not_finite_ends_and_its_host_copy_goes():
    """C26, C30: the copy was planned before the step that it depends on had been looked at."""
    kinds = kind_config(slot_bytes={"kv": 1}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=1 << 10)
    rig = Rig(depth=1, chunked_prefill_size=8, kinds=kinds)
    req = rig.add(40)
    rig.launch()
    rig.scheduler.preemption.retract(req)
    assert rig.scheduler.memory.host_copies.num_bytes
    other = rig.add(5)
    rig.launch()
    (update,) = rig.commit(failed=(0,))
    assert (update.request_id, update.finish) == (req.id, FinishReason.ERROR)
    assert rig.scheduler.memory.host_copies.num_bytes == 0
    rig.run()
    assert rig.finish_of(other) is FinishReason.LENGTH
    assert [plan.host.drops for plan in rig.plans if plan.host.drops] == [(req.id,)]


def test_what_a_request_generated_that_failed_later_is_not_in_the_cache():
    """Its prompt was, and is; what came behind is looked at again from there on."""
    rig = Rig(page_size=1)
    rig.add(3, max_new=8)
    for _ in range(3):
        rig.step()
    rig.launch()
    rig.commit(failed=(0,))
    assert rig.scheduler.pools.cache.num_pages == 3
    assert rig.free_pages == 61


def test_flush_drops_what_nobody_holds():
    rig = Rig()
    rig.add(12)
    rig.run()
    assert rig.scheduler.flush_cache() == 3
    assert rig.free_pages == 64
