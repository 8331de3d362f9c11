"""Who is to blame for a step that failed (C27): groups on trial, in halves, with nobody else beside them."""

from types import SimpleNamespace

import pytest

from forebay.base.errors import EngineError
from forebay.requests.request import Request, RequestFault, Status, blamed_on
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason
from forebay.scheduler.suspects import Suspects
from tests.scheduler.rig import Rig


def suspects_of(n: int) -> tuple[Suspects, list[Request]]:
    reqs = [Request(i + 1, [1], SamplingParams()) for i in range(n)]
    suspects = Suspects()
    suspects.add_group([(req, 1) for req in reqs])
    return suspects, reqs


def test_those_of_a_failed_step_are_tried_in_halves():
    suspects, reqs = suspects_of(5)
    assert list(suspects.under_test) == reqs[:3]
    suspects.add_group([(req, 1) for req in reqs[:3]])
    assert list(suspects.under_test) == reqs[:2]
    for expected in (reqs[2:3], reqs[3:], []):
        for req in list(suspects.under_test):
            suspects.clear(req)
        assert list(suspects.under_test) == expected
    assert not suspects.groups


@pytest.mark.parametrize("status", Status, ids=lambda status: status.name)
def test_suspects_that_computed_their_suspected_tokens_without_a_failure_are_cleared(status: Status) -> None:
    class Computed:
        def __init__(self, num_tokens: int) -> None:
            self.status, self.allocation = status, SimpleNamespace(kv_committed=num_tokens)

    suspects, reqs = Suspects(), [Computed(num_tokens) for num_tokens in (4, 5, 6)]
    suspects.groups.append(dict.fromkeys(reqs, 5))
    suspects.clear_passed()
    runs = status in (Status.EXTENDING, Status.DECODING)
    assert list(suspects.under_test) == (reqs[:1] if runs else reqs)


def test_a_fault_names_the_request_that_work_was_done_for():
    req = Request(7, [1], SamplingParams())
    with pytest.raises(RequestFault) as caught, blamed_on(req):
        raise MemoryError
    assert caught.value.req is req
    assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("guilty", range(6))
def test_nobody_else_runs_until_the_guilty_one_is_found(guilty, depth):
    rig = Rig(depth=depth, num_pages=200)
    reqs = [rig.add(5, max_new=6) for _ in range(6)]
    culprit = reqs[guilty]
    for _ in range(3):
        rig.step()
    late, steps, tried = None, 0, []
    while culprit.id in rig.scheduler.requests:
        plan = rig.launch()
        here = {rig.scheduler.pools.table.allocation_of(row).id for row in plan.rows.tolist()}
        if rig.scheduler.queues.suspects.groups:
            tried.append(here)
        if culprit.id in here:
            while len(rig.flights) > 1:
                rig.commit()
            rig.updates += rig.fail(EngineError("broken"))
            steps += 1
            assert steps <= 4, "six requests: three halvings at most, and the end"
            late = late or rig.add(5)
        else:
            rig.commit()
    assert not any(late.id in here for here in tried)
    assert tried[-1] == {culprit.id}
    assert rig.finish_of(culprit) is FinishReason.ERROR
    rig.run()
    assert {rig.finish_of(req) for req in [*reqs, late] if req is not culprit} == {FinishReason.LENGTH}
    assert [len(rig.tokens_of(req)) for req in reqs if req is not culprit] == [6] * 5
