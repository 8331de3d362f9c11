"""Rank 0's side of the log, and the side of the rank that executes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import pytest

from forebay.base.errors import Conflict, EngineError
from forebay.engine.lifecycle.sleep import NoMemory
from forebay.engine.ranks.broadcast import RankBroadcast, RankMemory
from forebay.engine.ranks.follower import Follower
from forebay.engine.ranks.outcome import Outcome, RankLost
from forebay.requests.step_plan import StepPlan, StepResult
from tests.plans import changed
from tests.requests.test_step_plan import PLAN


class Step:
    def __init__(self, device: Device) -> None:
        self._device = device

    def result(self) -> StepResult:
        if self._device.result_error:
            raise RuntimeError(self._device.result_error)
        return StepResult(token_ids=[], failed=self._device.failed)


class Device(NoMemory):
    """A runner and a memory that write down what they do. An error is raised where one is named."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failed: tuple[int, ...] = ()
        self.launch_error = self.result_error = self.memory_error = ""
        self.more = False

    def launch(self, plan: StepPlan) -> Step:
        self.done.append(plan)
        if self.launch_error:
            raise RuntimeError(self.launch_error)
        return Step(self)

    def capture_next(self) -> bool:
        self.done.append("capture")
        return self.more

    def keep(self, places: Mapping[str, Any]) -> int:
        self.done.append({kind: ids.tolist() for kind, ids in places.items()})
        return 7

    def release(self, tags: Collection[str]) -> None:
        self.done.append(("release", *tags))
        if self.memory_error:
            raise RuntimeError(self.memory_error)

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        self.done.append(("resume", *tags))

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self.done.append(("update", path))


class Group:
    """Two ranks beside rank 0 in one process, each with a device of its own."""

    def __init__(self) -> None:
        self.devices = [Device() for _ in range(3)]
        self._followers = [Follower(rank, device, device) for rank, device in enumerate(self.devices)][1:]
        self._outcomes: list[deque[tuple[int, Outcome]]] = [deque(), deque()]
        self.broadcast = RankBroadcast(self.devices[0], self)
        self.memory = RankMemory(self.devices[0], self.broadcast)

    def send(self, record: bytes, *, limited: bool = True) -> None:
        for follower, outcomes in zip(self._followers, self._outcomes, strict=True):
            follower.take(record)
            outcomes.append(follower.land())

    def outcomes(self, number: int) -> list[Outcome]:
        return [dict(outcomes)[number] for outcomes in self._outcomes]

    def lost(self, error: EngineError) -> NoReturn:
        raise error


def test_broadcast_step_and_changes_reach_every_rank_in_one_order():
    group = Group()
    group.broadcast.launch(PLAN).result()
    group.broadcast.capture_next()
    assert group.memory.keep({"kv": np.array([3, 1])}) == 7
    group.memory.release(["kv_cache"])
    group.memory.resume(["kv_cache"], lambda: None)
    group.memory.update("/model", {}, lambda: None)
    done = [PLAN, "capture", {"kv": [3, 1]}, ("release", "kv_cache"), ("resume", "kv_cache"), ("update", "/model")]
    assert [device.done for device in group.devices] == [done] * 3


def test_broadcast_row_that_failed_on_any_rank_has_failed():
    group = Group()
    for device, failed in zip(group.devices, [(4,), (), (2, 4)], strict=True):
        device.failed = failed
    result = group.broadcast.launch(PLAN).result()
    assert (result.failed, result.num_ranks) == ((2, 4), 3)


@pytest.mark.parametrize("where", ["launch_error", "result_error"])
def test_broadcast_step_that_failed_on_one_rank_alone_fails(where, caplog):
    caplog.set_level("INFO", "forebay")
    group = Group()
    setattr(group.devices[2], where, "no room")
    with pytest.raises(EngineError, match="step 1 failed on rank 2: RuntimeError: no room"):
        group.broadcast.launch(PLAN).result()
    setattr(group.devices[2], where, "")
    later = changed(PLAN, step=2)
    group.broadcast.launch(later).result()
    assert [device.done for device in group.devices] == [[PLAN, later]] * 3
    events = [record.message.split()[0] for record in caplog.records]
    assert events == ["rank_failed", "step_void", "step_void"]  # of rank 2, then of both ranks


def test_broadcast_capture_that_ranks_disagree_about_ends_them():
    group = Group()
    group.devices[1].more = True
    with pytest.raises(RankLost, match="captured"):
        group.broadcast.capture_next()


@pytest.mark.parametrize(("ranks", "error"), [([0, 1, 2], RuntimeError), ([0], RankLost), ([2], RankLost)])
def test_broadcast_change_that_some_ranks_refuse_ends_them_and_of_all_is_an_error(ranks, error):
    group = Group()
    for rank in ranks:
        group.devices[rank].memory_error = "busy"
    with pytest.raises(error, match="busy"):
        group.memory.release(["weights"])


def test_broadcast_weights_from_memory_are_refused():
    group = Group()
    with pytest.raises(Conflict, match="from a checkpoint"):
        group.memory.update(None, {"a": 1}, lambda: None)
    assert group.devices[1].done == []
