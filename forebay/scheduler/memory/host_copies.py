"""Host copies of retracted requests, so that they need not compute their KV again (C26)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.config.engine_config import KindConfig
from forebay.requests.step_plan import HostCopy, HostWork
from forebay.scheduler.step_draft import StepDraft


@dataclass(slots=True)
class _Copy:
    num_tokens: int
    num_bytes: int
    step: int  # that makes the copy


class HostCopies:
    """The host copies by request, and what the next plan has to do about them."""

    def __init__(self, config: KindConfig) -> None:
        self._config = config
        self._copies: dict[int, _Copy] = {}
        self.num_bytes = 0
        self.num_saved = 0

    @property
    def room(self) -> int:
        """Bytes that more of them may have."""
        return max(0, self._config.retraction_host_bytes - self.num_bytes)

    def bytes_of(self, num_slots: Mapping[str, int]) -> int:
        """Return the bytes of `num_slots`, the number of slots by kind of cache."""
        return sum(num * self._config.slot_bytes.get(kind, 0) for kind, num in num_slots.items())

    def num_tokens(self, request_id: int) -> int:
        """Return the number of tokens that the request's host copy has; 0 without a copy."""
        copy = self._copies.get(request_id)
        return copy.num_tokens if copy else 0

    def made_by(self, request_id: int) -> int:
        """Return the step that makes the request's host copy; 0 without a copy."""
        copy = self._copies.get(request_id)
        return copy.step if copy else 0

    def save(self, copy: HostCopy, num_tokens: int, draft: StepDraft) -> bool:
        """Copy the `num_tokens` tokens of a request that is being retracted to the host, in the next plan. Return False
        if nothing is copied, because recomputing is cheaper or the host has no room."""
        num_bytes = self.bytes_of({kind: len(ids) for kind, ids in copy.slots.items()})
        worth_it = num_bytes <= num_tokens * self._config.recompute_bytes_per_token
        if not worth_it or not self.room or num_bytes > self.room:
            return False
        draft.saves.append(copy)
        self._copies[copy.request_id] = _Copy(num_tokens, num_bytes, draft.step)
        self.num_bytes += num_bytes
        self.num_saved += 1
        return True

    def load(self, copy: HostCopy, draft: StepDraft) -> None:
        """Bring a request's copy back; the host has none any more."""
        draft.loads.append(copy)
        self.num_bytes -= self._copies.pop(copy.request_id).num_bytes

    def drop(self, request_id: int, draft: StepDraft) -> None:
        """The request will not come back, or must compute everything again."""
        copy = self._copies.pop(request_id, None)
        if copy is None:
            return
        self.num_bytes -= copy.num_bytes
        if copy.step == draft.step:
            draft.saves = [save for save in draft.saves if save.request_id != request_id]
        else:
            draft.drops.append(request_id)

    def start_over(self, void: Iterable[HostWork | StepDraft], committed: int) -> list[int]:
        """Forget copies that `void` was to make: only copies that a step up to `committed` has made can be relied on.
        All others are gone, wherever those steps stopped; whose they were, which the next step has to drop."""
        gone: set[int] = set()
        for work in void:
            gone |= {*work.drops, *(copy.request_id for copy in (*work.saves, *work.loads))}
        gone |= {id for id, copy in self._copies.items() if copy.step > committed}
        for request_id in gone & self._copies.keys():
            self.num_bytes -= self._copies.pop(request_id).num_bytes
        return sorted(gone)
