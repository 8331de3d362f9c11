"""What the last update of a request says of its way: how long it waited and for what, and its chunks."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.config.engine_config import KindConfig
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.requests.updates import MOST_CHUNK_ENDS, History, WaitedFor
from tests.scheduler.rig import Rig
from tests.scheduler.roles import arrive, decode


def history_of(rig: Rig, request_id: int) -> History | None:
    (last,) = [update for update in rig.updates if update.request_id == request_id and update.finish]
    return last.history


@pytest.mark.parametrize(
    ("settings", "waited_for"),
    [({"max_running_requests": 1}, WaitedFor.ROW), ({"num_pages": 8, "page_size": 4}, WaitedFor.MEMORY)],
)
def test_history_names_what_a_request_waited_for(settings: dict[str, int], waited_for: WaitedFor) -> None:
    rig = Rig(**settings)
    first, second = (rig.add(8, max_new=16) for _ in range(2))
    while not rig.scheduler.idle:
        rig.now += 1.0
        rig.step()
    ahead, behind = (history_of(rig, req.id) for req in (first, second))
    assert ahead is not None
    assert behind is not None
    assert (ahead.waited_s, ahead.waited_for) == (1.0, WaitedFor.TURN)
    assert behind.waited_s > 10.0
    assert behind.waited_for is waited_for


def test_history_counts_the_chunks_of_a_prompt() -> None:
    rig = Rig(chunked_prefill_size=4)
    req = rig.add(10, max_new=2)
    rig.run()
    assert history_of(rig, req.id) == History(0.0, WaitedFor.TURN, 3, [0.0, 0.0, 0.0])


def test_history_has_the_ends_of_the_first_chunks_alone() -> None:
    rig = Rig(chunked_prefill_size=1, context_length=128)
    req = rig.add(MOST_CHUNK_ENDS + 3, max_new=1)
    while not rig.scheduler.idle:
        rig.now += 1.0
        rig.step()
    found = history_of(rig, req.id)
    assert found is not None
    assert found.num_chunks == MOST_CHUNK_ENDS + 3
    assert found.chunk_ends_s == [float(number) for number in range(1, MOST_CHUNK_ENDS + 1)]


def test_history_of_a_request_that_waited_for_another_ones_prefix() -> None:
    rig = Rig(chunked_prefill_size=64, page_size=4)
    tokens = list(range(1, 57))
    first = rig.add(tokens, max_new=2)
    second = rig.add([*tokens, 5], max_new=2)
    rig.run()
    found = history_of(rig, second.id)
    assert found is not None
    assert found.waited_for is WaitedFor.PREFIX
    assert history_of(rig, first.id) is not None


def test_history_counts_the_steps_from_graphs_that_decoded_the_request() -> None:
    """Two steps of the first request, of which the second has the last as well."""
    rig = Rig()
    first = rig.add(4, max_new=3)
    for replayed in (False, True):
        rig.launch()
        rig.commit(replayed=replayed)
    second = rig.add(4, max_new=2)
    for replayed in (False, True):
        rig.launch()
        rig.commit(replayed=replayed)
    found = {req.id: history_of(rig, req.id) for req in (first, second)}
    assert {id: history.num_replayed for id, history in found.items() if history} == {first.id: 1, second.id: 1}
    assert rig.scheduler.counters["replayed_steps"] == 2


def test_history_counts_the_padded_steps_that_decoded_the_request() -> None:
    """The second of the three steps of the first request is padded, and so is the last one of the second request."""
    rig = Rig()
    first, second = rig.add(4, max_new=3), None
    for padded in (False, True, False, True):
        rig.launch()
        rig.commit(padded=padded)
        second = second or (rig.add(4, max_new=2) if padded else None)
    assert second is not None
    found = [history_of(rig, req.id) for req in (first, second)]
    assert [history.num_padded for history in found if history] == [1, 1]


@pytest.mark.parametrize(("depth", "num_ahead"), [(1, 0), (2, 3)])
def test_history_counts_the_steps_that_were_launched_while_another_was_in_flight(depth: int, num_ahead: int) -> None:
    """Of four steps all but the first are ahead, if two are in flight at a time."""
    rig = Rig()
    req = rig.add(4, max_new=4)
    while not rig.scheduler.idle:
        while len(rig.scheduler.queues.flights) < depth and rig.launch():
            pass
        rig.commit()
    found = history_of(rig, req.id)
    assert found is not None
    assert found.num_ahead == num_ahead


def test_history_of_a_decode_engine_counts_no_steps_while_the_request_waits_for_a_row() -> None:
    """Its first token comes with the transfer; the other request decodes meanwhile."""
    half = decode(max_running_requests=1, extra=1, radix_cache=False)
    first, second = half.meet(10, room=1, max_new=5), half.meet(10, room=2, max_new=3)
    half.step()
    for offer in list(half.orders):
        arrive(half, offer)
    while not half.scheduler.idle:
        half.launch()
        half.commit(replayed=True)
    found = [history_of(half, req.id) for req in (first, second)]
    assert [history.num_replayed for history in found if history] == [4, 2]


def test_history_counts_the_steps_that_decoded_the_request_and_loaded_tokens_into_hot_buffers() -> None:
    """The prompt of the second request is computed in a step that loads, which counts for neither of the two, and the
    decode behind it loads nothing."""
    rig = Rig(kinds=KindConfig(num_slots={RESIDENT: 8}))
    first, second = rig.add(4, max_new=4), None
    for total in (0, 5, 9, 9):
        if total == 9 and second is None:
            second = rig.add(4, max_new=2)
        rig.launch()
        rig.commit(counts={RESIDENT: np.array([20, total])})
    assert second is not None
    found = [history_of(rig, req.id) for req in (first, second)]
    assert [history.num_hot_loads for history in found if history] == [1, 0]
