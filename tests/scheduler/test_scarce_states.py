"""Which states the prefix cache keeps when there are few slots (C18)."""

import pytest

from forebay.config.engine_config import StateStrategy
from forebay.requests.updates import MissReason
from tests.kinds_of import kind_config, states_of
from tests.scheduler.rig import Rig


def scarce(num_cached: int, **changes) -> Rig:
    """One request at a time, and room for `num_cached` states besides its own two."""
    state = kind_config(num_slots=2 + num_cached, track_interval=64, anchor_interval=1000)
    changes = {"page_size": 4, "context_length": 256, "num_pages": 512, "chunked_prefill_size": 512} | changes
    return Rig(kinds=state, max_running_requests=1, **changes)


def run(rig: Rig, prompt: list[int], **kw) -> int:
    """Play a request that ends at a page's end, so that its live state is kept; how much was cached for it."""
    req = rig.add(prompt, max_new=4 - (len(prompt) - 1) % 4, **kw)
    rig.run()
    return req.cache_report.cached_tokens


def test_the_hints_of_one_long_prompt_push_no_other_conversation_out():
    rig = scarce(4)
    chats = [[*range(i, i + 20)] for i in (100, 200, 300)]
    for chat in chats:
        run(rig, chat)
    run(rig, [*range(400, 600)], resume_points=range(20, 200, 20))
    assert [run(rig, [*chat, 1000, 7]) for chat in chats] == [20, 20, 20]
    assert states_of(rig.scheduler.pools).num_skipped > 0


def test_c32_flood_of_one_tenant_leaves_the_conversations_of_another_by_its_weight():
    rig = scarce(4, tenants={"a": 1, "b": 3})
    chats = [[*range(i, i + 20)] for i in (100, 200, 300)]
    for chat in chats:
        run(rig, chat, tenant="b", namespace="b")
    for i in range(400, 700, 20):
        run(rig, [*range(i, i + 20)], tenant="a", namespace="a")
    assert [run(rig, [*chat, 1000, 7], tenant="b", namespace="b") for chat in chats] == [20, 20, 20]


@pytest.mark.parametrize("num_cached", [2, 3])
def test_a_prefix_shared_by_strangers_gets_its_state_although_a_conversation_must_give_way(num_cached):
    rig = scarce(num_cached)
    for i in (100, 200, 300):
        run(rig, [*range(60), *range(i, i + 20)])
    assert run(rig, [*range(60), *range(400, 420)]) == 60


def test_a_conversation_that_lost_its_state_takes_nobodys_to_have_it_back_in_its_middle():
    rig = scarce(2)
    run(rig, [*range(100, 160)])
    for i in (200, 300, 400):
        run(rig, [*range(i, i + 60)])
    states = states_of(rig.scheduler.pools)
    evicted = states.in_tree.num_evicted
    again = rig.add([*range(100, 160), 1000, *range(10)], max_new=1)
    rig.step()
    assert (again.cache_report.miss_reason, again.cache_report.kv_tokens) == (MissReason.STATE_MISSING, 60)
    assert states.in_tree.num_evicted - evicted == 1, (
        "one for its own two slots, none for a place that nobody comes back to"
    )


def test_a_prompt_that_comes_again_gets_a_state_at_its_end_although_it_is_one_of_many():
    rig = scarce(2)
    for i in (100, 200, 300, 100, 400, 500):
        run(rig, [*range(i, i + 61)])
    run(rig, [*range(100, 161)])
    assert run(rig, [*range(100, 161)]) == 60


def test_no_buffer_keeps_to_the_same_rule():
    state = kind_config(num_slots=4, strategy=StateStrategy.NO_BUFFER, anchor_interval=1000)
    rig = Rig(kinds=state, max_running_requests=1, page_size=1, context_length=256, num_pages=512)
    run(rig, [*range(100, 120)])
    run(rig, [*range(200, 220)])
    run(rig, [*range(300, 500)], resume_points=range(20, 200, 20))
    assert run(rig, [*range(200, 220), 1000, 7]) >= 20
