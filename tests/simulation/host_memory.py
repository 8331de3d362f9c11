"""The copies of retracted requests in the memory of the hash model's host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.requests.step_plan import HostCopy, StepPlan
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, check_ids
from tests.simulation.hashing import U64
from tests.simulation.state_memory import StateMemory
from tests.simulation.window_memory import WindowMemory


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The words of `length` tokens in whole pages, [pages, page_size], and the state after them."""

    length: int
    kv: U64
    windows: U64
    state: np.uint64


class HostMemory:
    """Copies by request id."""

    def __init__(self, pages: SlotBytes, windows: WindowMemory | None, states: StateMemory | None) -> None:
        self.copies: dict[int, Copied] = {}
        self._pages, self._windows, self._states = pages, windows, states

    # -- launching ------------------------------------------------------------------------------------------------

    def check_loads(self, plan: StepPlan, table: npt.NDArray[np.int32], row_of: Mapping[int, int]) -> None:
        """A copy comes back to where its request is now, in the step that admits it."""
        admitted = {admission.request_id for admission in plan.admissions}
        for load in plan.host.loads:
            if load.request_id not in admitted:
                raise RunnerError(f"step {plan.step} loads request {load.request_id}, which it does not admit")
            row = row_of[load.request_id]
            loaded = load.slots
            pages = table[row, : len(loaded["kv"])]
            if not np.array_equal(pages, loaded["kv"]) or (self._pages.slots.owner[pages] != load.request_id).any():
                raise RunnerError(f"step {plan.step} loads into pages {loaded['kv']}; the row has {pages}")
            if self._states and loaded["state"].tolist() != plan.kinds.state.state_slots[plan.rows == row].tolist():
                raise RunnerError(f"step {plan.step} loads into slot {loaded['state']} of another request")
            if self._windows:
                windows = self._windows.full_to_window[pages[len(pages) - len(loaded["window"]) :]]
                if not np.array_equal(windows, loaded["window"]):
                    raise RunnerError(f"step {plan.step} loads into window pages {loaded['window']} of {windows}")

    # -- executing ------------------------------------------------------------------------------------------------

    def save(self, plan: StepPlan, lens: Sequence[int], broken: AbstractSet[int]) -> None:
        """`lens` are the tokens that the requests have computed when it is the step's turn."""
        for save, length in zip(plan.host.saves, lens, strict=True):
            pages = save.slots["kv"]
            check_ids(self._pages.slots, "saved pages", pages)
            if len(pages) * self._pages.by_slot.shape[1] - length not in range(self._pages.by_slot.shape[1]):
                raise RunnerError(f"request {save.request_id} has {length} tokens and saves pages {pages}")
            if self._states and save.request_id not in broken:
                after = self._states.lens[save.slots["state"]].tolist()
                if after != [length]:
                    raise RunnerError(f"request {save.request_id} has {length} tokens and saves a state of {after}")
            if save.request_id in self.copies and save.request_id not in broken:
                raise RunnerError(f"request {save.request_id} is on the host already")
            self.copies[save.request_id] = self._copy(save, length)

    def _copy(self, save: HostCopy, length: int) -> Copied:
        windows = self._windows.bytes.by_slot[save.slots["window"]] if self._windows else self._pages.by_slot[:0]
        state = self._states.states[save.slots["state"]][0] if self._states else POISON
        return Copied(length=length, kv=self._pages.by_slot[save.slots["kv"]], windows=windows, state=state)

    def drop(self, plan: StepPlan) -> None:
        """Copies that a failed step was to make may not be there."""
        for request_id in plan.host.drops:
            self.copies.pop(request_id, None)

    def load(self, plan: StepPlan, row_of: Mapping[int, int]) -> None:
        for load in plan.host.loads:
            copy = self.copies.pop(load.request_id, None)
            if copy is None:
                raise RunnerError(f"step {plan.step} loads request {load.request_id}; the host has nothing of it")
            start = int(plan.starts[plan.rows[: plan.num_extends] == row_of[load.request_id]][0])
            pages, windows = load.slots["kv"], load.slots.get("window", ())
            if (start, len(pages), len(windows)) != (copy.length, len(copy.kv), len(copy.windows)):
                raise RunnerError(f"request {load.request_id} goes on at {start}, {copy.length} tokens were saved")
            self._pages.by_slot[pages] = copy.kv
            if self._windows:
                self._windows.bytes.by_slot[windows] = copy.windows
            if self._states:
                self._states.put(int(load.slots["state"][0]), copy.state, copy.length)

    def spoil(self, plan: StepPlan) -> None:
        """A step fails: what it was to copy, here or back, may hold anything."""
        for save in plan.host.saves:
            gone = self._copy(save, 0)
            self.copies[save.request_id] = Copied(
                length=0, kv=np.full_like(gone.kv, POISON), windows=np.full_like(gone.windows, POISON), state=POISON
            )
        for load in plan.host.loads:
            self._pages.by_slot[load.slots["kv"]] = POISON
