"""Decodes of several tokens on the hash model's device by itself: what is accepted, and every kind of wrong plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.base.parts import I64
from forebay.config.engine_config import SpeculationOptions
from forebay.requests.step_plan import StepPlan
from tests.plans import changed, column
from tests.simulation.device_memory import RunnerError
from tests.simulation.hash_device import MODEL, PROMPT, SALT, Device, Tenant, ids, refused, right
from tests.simulation.hash_runner import NO_TOKEN, Propose
from tests.simulation.hashing import HashModel, state_values


def wide_device(model: HashModel = MODEL, propose: Propose | None = None) -> Device:
    """A device whose rows verify up to three drafts; with `propose` it makes them itself."""
    return Device(model, propose=propose, speculation=SpeculationOptions(num_draft_tokens=4))


def started(device: Device, **changes: Any) -> tuple[Tenant, list[int]]:
    """Request 1 in its first step, and what the reference says after it."""
    tenant = Tenant(device, 1, PROMPT, num_pages=8)
    plan = device.step(tenant, 7, **changes)
    said = right(PROMPT, 9, device.runner.model)
    assert device.run(plan) == said[:1]
    return tenant, said


def verified(device: Device, tenant: Tenant, drafts: list[int], *, length: int = 7, **changes: Any) -> StepPlan:
    """The plan of a decode that verifies these drafts behind `length` tokens."""
    return device.step(tenant, length + 1 + len(drafts), start=length, drafts=ids(*drafts), **changes)


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, full=False), replace(MODEL, window=0), replace(MODEL, full=False, window=0)]
)
def test_c16_drafts_are_accepted_up_to_the_first_that_is_not_what_is_sampled(model: HashModel, num_right: int) -> None:
    device = wide_device(model)
    tenant, said = started(device)
    drafts = [*said[1:4][:num_right], *(token + 1 for token in said[1:4][num_right:])]
    result = device.runner.launch(verified(device, tenant, drafts)).result()
    assert (result.token_ids, result.num_new) == (said[1 : num_right + 2], [num_right + 1])
    assert device.runner.lengths.kv_lens[1] == 7 + num_right + 1
    assert device.run(verified(device, tenant, [], length=7 + num_right + 1)) == [said[num_right + 2]]


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_c12_a_step_behind_one_in_flight_begins_where_that_one_ends(num_right: int) -> None:
    device = wide_device()
    tenant, said = started(device)
    drafts = [*said[1:4][:num_right], *(token + 1 for token in said[1:4][num_right:])]
    plans = [verified(device, tenant, drafts), verified(device, tenant, [5, 5], length=11)]
    device.runner.poison_free(())
    steps = [device.runner.launch(plan) for plan in plans]
    for step, told in zip(steps, (said[1 : num_right + 2], [said[num_right + 2]]), strict=True):
        device.runner.check_in_flight()
        assert step.result().token_ids == told


def test_drafts_that_the_device_made_are_its_rows() -> None:
    said = right(PROMPT, 9)
    device = wide_device(propose=lambda request_id, start, count: said[start - 7 :][:count])
    tenant, _ = started(device)
    plan = device.step(tenant, 11, start=7)
    assert device.run(plan) == said[1:5]
    refused(device, verified(device, tenant, [5], length=11), "0 drafts of a vocabulary")


def test_drafts_of_a_rows_last_tenant_are_found() -> None:
    device = wide_device(propose=lambda request_id, start, count: [0] * count)
    tenant, _ = started(device)
    device.runner.draft_tokens[tenant.row] = NO_TOKEN  # as they are when a row is handed out
    refused(device, device.step(tenant, 11, start=7), "no token")


@pytest.mark.parametrize(
    ("drafts", "changes", "why"),
    [
        ([1, 2, 3, 4], {}, "wrong query lengths"),
        ([1, 2], {"q_lens": ids(4)}, "3 drafts of a vocabulary"),
        ([1, 1000], {}, "2 drafts of a vocabulary of 1000"),
        ([1, 2], {"snap_seqs": ids(0), "snap_lens": ids(7)}, "outside of what its sequences compute"),
        ([1, 2], {"snap_seqs": ids(0), "snap_lens": ids(11)}, "outside of what its sequences compute"),
        ([1, 2], {"snap_seqs": ids(0, 0), "snap_lens": ids(8, 9)}, "snapshot of a decode twice"),
    ],
)
def test_a_wrong_decode_of_several_tokens_is_found(drafts: list[int], changes: dict[str, I64], why: str) -> None:
    device = wide_device()
    tenant, _ = started(device)
    if "snap_seqs" in changes:
        changes = {**changes, "snap_slots": device.states.take_ids(len(changes["snap_seqs"]), 1)}
    refused(device, verified(device, tenant, drafts, length=7, **changes), why)


def test_steps_with_prompts_that_decode_several_tokens_are_found() -> None:
    device = wide_device()
    tenant, _ = started(device)
    plan = verified(device, tenant, [1])
    extend = changed(plan, num_extends=1, starts=ids(7), input_ids=ids(1, 2), drafts=ids())
    refused(device, extend, "an extend after one")
    other = device.step(Tenant(device, 2, [4, 4]), 2)
    both = {
        name: np.concatenate([column(other, name), column(plan, name)]) for name in ("rows", "q_lens", "sample_mask")
    }
    refused(device, changed(other, **both, drafts=ids(1)), "wrong query lengths")


def test_drafts_for_which_there_is_no_page_are_found_whether_they_are_accepted_or_not() -> None:
    device = wide_device()
    tenant = Tenant(device, 1, PROMPT, num_pages=4)
    device.run(device.step(tenant, 7))
    device.runner.launch(verified(device, tenant, []))
    refused(device, verified(device, tenant, [1], length=8), "writes pages")


def test_a_window_that_a_step_may_still_look_at_must_not_go_before_its_turn() -> None:
    device = wide_device()
    tenant, said = started(device)
    first, second = (verified(device, tenant, drafts, length=at) for at, drafts in ((7, said[1:4]), (11, [5, 5])))
    device.runner.poison_free(())
    step = device.runner.launch(first)
    device.runner.launch(second)
    step.result()
    device.windows.slots.return_ids(device.windows.map.detach(tenant.pages[3:4]), 1)  # of tokens 6 and 7
    device.runner.check_in_flight()
    device.windows.slots.return_ids(device.windows.map.detach(tenant.pages[4:5]), 1)
    with pytest.raises(RunnerError, match=r"window pages .* released while step 3 reads"):
        device.runner.check_in_flight()


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_c18_a_snapshot_that_a_decode_may_come_to_is_taken_there_or_not_at_all(num_right: int) -> None:
    device = wide_device()
    tenant, said = started(device)
    drafts = [*said[1:4][:num_right], *(token + 1 for token in said[1:4][num_right:])]
    snapshot = {"snap_seqs": ids(0), "snap_lens": ids(9), "snap_slots": ids(tenant.spare)}
    device.run(verified(device, tenant, drafts, length=7, **snapshot))
    states = device.runner.states
    assert states is not None
    assert states.lens[tenant.live] == 7 + num_right + 1
    if num_right == 0:
        assert states.lens[tenant.spare] < 0
    else:
        assert states.lens[tenant.spare] == 9
        expected = state_values(np.array([*PROMPT, *said[:2]]), 0, SALT)[-1]
        assert states.states[tenant.spare] == expected


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_c30_only_what_counts_of_a_decode_has_to_be_finite(num_right: int, position: int) -> None:
    device = wide_device()
    tenant, said = started(device)
    drafts = [*said[1:4][:num_right], *(token + 1 for token in said[1:4][num_right:])]
    result = device.runner.launch(verified(device, tenant, drafts)).result(poisoned={0: position})
    assert result.failed == ((0,) if position <= num_right else ())
    assert (1 in device.runner.broken) == (position <= num_right)
