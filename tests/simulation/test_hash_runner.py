"""The hash model's device by itself: right plans give the reference's tokens, and every kind of wrong plan is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from forebay.base.parts import I64
from forebay.memory.slots import CACHE, Slots
from forebay.requests.step_plan import HostCopy, StepPlan
from tests.plans import changed, column, parts_of, plan_of
from tests.simulation.device_memory import RunnerError
from tests.simulation.hash_device import MODEL, PAGE, PROMPT, Device, Tenant, ids, refused, right
from tests.simulation.hash_runner import StepFailed
from tests.simulation.hashing import HashModel

Changes = Callable[[Tenant, Tenant], dict[str, I64]]
"""Of the tenant whose prefix is hit, and of the one that hits it: columns of a wrong plan."""

Used = Callable[[Device, Tenant, Tenant], tuple[Slots, int, int]]
"""Of the same tenants: a slot that a step in flight uses, and its owner."""

# -- right plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, full=False), replace(MODEL, window=0), replace(MODEL, full=False, window=0)]
)
@pytest.mark.parametrize("cuts", [[7], [1, 2, 3, 7], [3, 6, 7]])
def test_chunks_and_decodes_give_the_references_tokens(model: HashModel, cuts: list[int]) -> None:
    device = Device(model)
    tenant = Tenant(device, 1, PROMPT)
    tokens = device.run(*(device.step(tenant, stop) for stop in [*cuts, 8, 9]))
    assert tokens == right(PROMPT, 3, model)


def conversation(device: Device) -> tuple[Tenant, list[int]]:
    """Request 1 has left its first four tokens to the cache: two pages, and the state in its spare slot."""
    first = Tenant(device, 1, PROMPT)
    tokens = device.run(
        device.step(first, 7, snap_seqs=ids(0), snap_lens=ids(4), snap_slots=ids(first.spare)), device.step(first, 8)
    )
    device.kv.transfer(first.pages[:2], 1, CACHE)
    device.windows.in_tree.give_to_cache(first.pages[:2], 1)
    device.states.transfer(ids(first.spare), 1, CACHE)
    return first, tokens


def hit(device: Device, first: Tenant, **changes: Any) -> tuple[Tenant, StepPlan]:
    """Return request 2, whose prompt has the first four tokens of request 1, and the plan that admits it."""
    other = Tenant(device, 2, [3, 1, 4, 1, 8], cached=first.pages[:2].tolist())
    changes = {"copy_src": ids(first.spare), "copy_dst": ids(other.live), **changes}
    return other, device.step(other, 5, start=4, **changes)


def test_a_hit_goes_on_from_the_snapshot_of_another_request() -> None:
    device = Device()
    first, tokens = conversation(device)
    assert tokens == right(PROMPT, 2)
    assert device.run(hit(device, first)[1]) == right([3, 1, 4, 1, 8], 1)


def test_c26_what_was_saved_on_the_host_comes_back_elsewhere() -> None:
    device = Device()
    first = Tenant(device, 1, PROMPT)
    tokens = device.run(device.step(first, 7), device.step(first, 8))
    save = copy_of(device, first, 8)
    bystander = Tenant(device, 2, [5, 5])
    device.run(device.step(bystander, 2, saves=(save,)))
    again = Tenant(device, 1, [*PROMPT, *tokens], row=3)
    tokens += device.run(device.step(again, 9, start=8, clears=ids(), loads=(copy_of(device, again, 8),)))
    assert tokens == right(PROMPT, 3)
    assert not device.runner.host.copies


def copy_of(device: Device, tenant: Tenant, num_tokens: int) -> HostCopy:
    pages = tenant.pages[: -(-num_tokens // PAGE)]
    windows = device.windows.map.full_to_window[pages[device.windows.map.first_needed(num_tokens) :]].astype(np.int64)
    return HostCopy(
        request_id=tenant.number, slots={"kv": np.array(pages), "window": windows, "state": ids(tenant.live)}
    )


# -- wrong plans ------------------------------------------------------------------------------------------------------


def test_a_slot_must_be_cleared_for_its_tenant() -> None:
    device = Device()
    refused(device, device.step(Tenant(device, 1, PROMPT), 7, clears=ids()), "their last tenant left")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (lambda first, other: {"clears": ids(other.live)}, "one slot twice"),
        (lambda first, other: {"copy_dst": ids(), "copy_src": ids()}, "their last tenant left"),
        (lambda first, other: {"copy_src": ids(first.live)}, "copies slots"),
        (lambda first, other: {"copy_src": ids(other.spare)}, "reads poison"),
        (lambda first, other: {"copy_dst": ids(first.live)}, "their last tenant left"),
        (lambda first, other: {"copy_src": ids(0)}, "copied slots outside"),
        (lambda first, other: {"state_slots": ids(first.live)}, "not its requests'"),
        (lambda first, other: {"state_slots": ids(0)}, "state slots outside"),
        (lambda first, other: {"snap_slots": ids(first.live)}, "not its requests'"),
        (lambda first, other: {"snap_slots": ids(other.live)}, "twice"),
        (lambda first, other: {"snap_lens": ids(4)}, "outside of what its sequences compute"),
        (lambda first, other: {"snap_lens": ids(6)}, "outside of what its sequences compute"),
        (lambda first, other: {"map_pages": ids(), "map_windows": ids()}, "windows that are gone"),
        (lambda first, other: {"map_windows": other.pages + 50}, "window pages outside the pool"),
    ],
)
def test_a_wrong_beginning_is_found(changes: Changes, why: str) -> None:
    device = Device()
    first, _ = conversation(device)
    other, plan = hit(device, first, snap_seqs=ids(0), snap_lens=ids(5), snap_slots=ids(0))
    plan = changed(plan, snap_slots=ids(other.spare))
    refused(device, changed(plan, **changes(first, other)), why)


def test_a_state_of_another_length_than_the_hits_is_found() -> None:
    device = Device()
    first = Tenant(device, 1, PROMPT)
    device.run(device.step(first, 7, snap_seqs=ids(0), snap_lens=ids(3), snap_slots=ids(first.spare)))
    device.kv.transfer(first.pages[:2], 1, CACHE)
    device.windows.in_tree.give_to_cache(first.pages[:2], 1)
    device.states.transfer(ids(first.spare), 1, CACHE)
    refused(device, hit(device, first)[1], "state of another length")


def test_two_sequences_in_one_slot_are_found() -> None:
    device = Device()
    plans = [device.step(Tenant(device, number, PROMPT), 7) for number in (1, 2)]
    both = {
        name: np.concatenate([column(plan, name) for plan in plans])
        for part in parts_of(plans[0])
        for name in part.columns
    }
    both["state_slots"] = both["state_slots"][[0, 0]]
    admissions = plans[0].admissions + plans[1].admissions
    refused(device, plan_of(step=1, num_extends=2, **both, admissions=admissions), "twice")


def test_states_and_windows_of_others_and_of_nobody_are_found() -> None:
    device = Device()
    first, _ = conversation(device)
    _, plan = hit(device, first)
    wrong = device.windows.map.full_to_window[first.pages[2:3]].astype(np.int64)
    refused(
        device, changed(plan, map_windows=wrong.repeat(len(plan.kinds.window.map_windows))), "windows that are gone"
    )
    device = Device()
    first, _ = conversation(device)
    _, plan = hit(device, first)
    device.windows.map.detach(first.pages[1:2])
    refused(device, plan, "windows that are gone")


def test_a_window_with_other_tokens_is_found_although_no_sampled_token_looks_there() -> None:
    """A chunk's first tokens look further back than its last one, which is all that is sampled from."""
    device = Device()
    first, _ = conversation(device)
    second = Tenant(device, 3, [8, 8, 8, 8, 8], num_pages=4)
    device.run(device.step(second, 5))
    pages = np.concatenate([first.pages[:2], second.pages[:2]])
    other = Tenant(device, 2, [3, 1, 4, 1, 5, 9, 2, 6], cached=first.pages[:2].tolist())
    plan = device.step(other, 8, start=4, copy_src=ids(first.spare), copy_dst=ids(other.live))
    device.runner.poison_free(())
    step = device.runner.launch(plan)
    assert device.runner.windows is not None
    kv = device.runner.windows.bytes.by_slot
    windows = device.windows.map.full_to_window[pages]
    kv[windows[:2]] = kv[windows[2:]]
    with pytest.raises(RunnerError, match="holds other tokens' KV"):
        step.result()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"request_id": 2}, "does not admit"),
        ({"kv": ids(1, 2, 3, 4)}, "loads into pages"),
        ({"window": ids(1, 2, 3)}, "loads into window pages"),
        ({"state": ids(3)}, "their last tenant left"),
    ],
)
def test_a_copy_from_the_host_in_the_wrong_place_is_found(changes: dict[str, Any], why: str) -> None:
    device = Device()
    first = Tenant(device, 1, PROMPT)
    device.run(device.step(first, 7), device.step(first, 8))
    device.run(device.step(Tenant(device, 2, [5, 5]), 2, saves=(copy_of(device, first, 8),)))
    again = Tenant(device, 1, [*PROMPT, 0, 0], row=3)
    load = copy_of(device, again, 8)
    slots = load.slots | {kind: value for kind, value in changes.items() if kind in load.slots}
    load = structs.replace(load, slots=slots, request_id=changes.get("request_id", load.request_id))
    refused(device, device.step(again, 9, start=8, clears=ids(), loads=(load,)), why)


def test_what_is_not_on_the_host_cannot_come_back() -> None:
    device = Device()
    tenant = Tenant(device, 1, PROMPT)
    plan = device.step(tenant, 7, start=6, clears=ids(), loads=(copy_of(device, tenant, 6),))
    refused(device, plan, "the host has nothing of it")


def test_a_copy_of_fewer_pages_than_tokens_is_found() -> None:
    device = Device()
    first = Tenant(device, 1, PROMPT)
    device.run(device.step(first, 7))
    save = copy_of(device, first, 7)
    save.slots["kv"] = save.slots["kv"][:3]
    other = Tenant(device, 2, [5, 5])
    refused(device, device.step(other, 2, saves=(save,)), "saves pages")


# -- steps in flight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "used",
    [
        lambda device, first, other: (device.states, other.live, 2),
        lambda device, first, other: (device.states, other.spare, 2),
        lambda device, first, other: (device.states, first.spare, CACHE),
        lambda device, first, other: (device.windows.slots, device.windows.map.full_to_window[other.pages[2]], 2),
        lambda device, first, other: (device.windows.slots, device.windows.map.full_to_window[first.pages[1]], CACHE),
    ],
)
@pytest.mark.parametrize("taken_again", [False, True])
def test_what_a_step_in_flight_uses_must_not_be_released(used: Used, taken_again: bool) -> None:
    device = Device()
    first, _ = conversation(device)
    other, plan = hit(device, first, snap_seqs=ids(0), snap_lens=ids(5))
    device.runner.poison_free(())
    device.runner.launch(changed(plan, snap_slots=ids(other.spare)))
    device.runner.check_in_flight()
    slots, slot, owner = used(device, first, other)
    slots.return_ids(ids(slot), owner)
    if taken_again:
        assert slots.take_ids(1, 3) == slot
    with pytest.raises(RunnerError, match="were released while"):
        device.runner.check_in_flight()


def test_a_live_slot_must_not_become_the_caches_while_a_step_takes_it_further() -> None:
    device = Device()
    tenant = Tenant(device, 1, PROMPT)
    device.runner.launch(device.step(tenant, 6))
    device.states.transfer(ids(tenant.live), 1, CACHE)
    with pytest.raises(RunnerError, match="were released while"):
        device.runner.check_in_flight()


def test_a_failed_step_leaves_garbage_in_all_that_it_was_to_write() -> None:
    device = Device()
    first, _ = conversation(device)
    other, plan = hit(device, first)
    with pytest.raises(StepFailed):
        device.runner.launch(plan).result(fails=True)
    assert device.runner.states is not None
    assert device.runner.states.lens[other.live] < 0
    assert device.runner.states.lens[first.spare] == 4
