"""What retracted requests keep in host memory, so that they need not compute it again (C26)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.config.engine_config import StateConfig
from forebay.requests.step_plan import HostWork, Kept
from forebay.scheduler.step_draft import StepDraft


@dataclass(slots=True)
class _Copy:
    num_tokens: int
    num_bytes: int
    step: int  # that makes the copy


class KeptOnHost:
    """The host copies by request, and what the next plan has to do about them."""

    def __init__(self, config: StateConfig) -> None:
        self._config = config
        self._copies: dict[int, _Copy] = {}
        self.num_bytes = 0
        self.num_kept = 0

    def num_tokens(self, request_id: int) -> int:
        """Tokens whose KV and state are on the host; 0 where nothing is."""
        copy = self._copies.get(request_id)
        return copy.num_tokens if copy else 0

    def made_by(self, request_id: int) -> int:
        """The step when whose commit the request's copy is there; 0 where there is none."""
        copy = self._copies.get(request_id)
        return copy.step if copy else 0

    def save(self, kept: Kept, num_tokens: int, draft: StepDraft) -> bool:
        """Copy in the next plan what a request that is being retracted has of so many tokens. False where nothing is
        copied: copying both ways must beat recomputing, and the host must have room."""
        config = self._config
        num_bytes = len(kept.pages) * config.page_bytes + len(kept.window_pages) * config.window_page_bytes
        num_bytes += config.slot_bytes if kept.state_slot else 0
        worth_it = num_bytes <= num_tokens * config.recompute_bytes_per_token
        room = config.retraction_host_bytes - self.num_bytes
        if not worth_it or room <= 0 or num_bytes > room:
            return False
        draft.saves.append(kept)
        self._copies[kept.request_id] = _Copy(num_tokens, num_bytes, draft.step)
        self.num_bytes += num_bytes
        self.num_kept += 1
        return True

    def load(self, kept: Kept, draft: StepDraft) -> None:
        """Bring a request's copy back; the host has none any more."""
        draft.loads.append(kept)
        self.num_bytes -= self._copies.pop(kept.request_id).num_bytes

    def drop(self, request_id: int, draft: StepDraft) -> None:
        """The request will not come back, or must compute everything again."""
        copy = self._copies.pop(request_id, None)
        if copy is None:
            return
        self.num_bytes -= copy.num_bytes
        if copy.step == draft.step:
            draft.saves = [kept for kept in draft.saves if kept.request_id != request_id]
        else:
            draft.drops.append(request_id)

    def start_over(self, void: Iterable[HostWork | StepDraft], committed: int) -> list[int]:
        """What `void` was to do does not count: only copies that a step up to `committed` has made can be relied on.
        All others are gone, wherever those steps stopped; whose they were, which the next step has to drop."""
        gone: set[int] = set()
        for work in void:
            gone |= {*work.drops, *(kept.request_id for kept in (*work.saves, *work.loads))}
        gone |= {id for id, copy in self._copies.items() if copy.step > committed}
        for request_id in gone & self._copies.keys():
            self.num_bytes -= self._copies.pop(request_id).num_bytes
        return sorted(gone)
