"""What retracted requests keep in host memory, so that they need not compute it again (C26)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.config.engine_config import StateConfig
from forebay.requests.step_plan import Kept, StepPlan


@dataclass(slots=True)
class _Copy:
    num_tokens: int
    num_bytes: int
    step: int | None = None  # that makes the copy; None while it is not planned


class KeptOnHost:
    """The copies on the host by request, and what the next plan has to do about them."""

    def __init__(self, config: StateConfig) -> None:
        self._config = config
        self._copies: dict[int, _Copy] = {}
        self._saves: list[Kept] = []
        self._loads: list[Kept] = []
        self._drops: list[int] = []
        self.num_bytes = 0
        self.num_kept = 0

    def num_tokens(self, request_id: int) -> int:
        """Tokens whose KV and state are on the host; 0 where nothing is."""
        copy = self._copies.get(request_id)
        return copy.num_tokens if copy else 0

    def made_by(self, request_id: int) -> int:
        """The step when whose commit the request's copy is there; 0 where none is awaited."""
        copy = self._copies.get(request_id)
        return copy.step or 0 if copy else 0

    def save(self, kept: Kept, num_tokens: int) -> bool:
        """Copy in the next plan what a request that is being retracted has of so many tokens; False where that is not
        worth it.

        Worth it is what takes less time to copy out and back than to compute, as long as the host has room.
        """
        config = self._config
        num_bytes = len(kept.pages) * config.page_bytes + len(kept.window_pages) * config.window_page_bytes
        num_bytes += config.slot_bytes if kept.state_slot else 0
        worth_it = num_bytes <= num_tokens * config.recompute_bytes_per_token
        room = config.retraction_host_bytes - self.num_bytes
        if not worth_it or room <= 0 or num_bytes > room:
            return False
        self._saves.append(kept)
        self._copies[kept.request_id] = _Copy(num_tokens, num_bytes)
        self.num_bytes += num_bytes
        self.num_kept += 1
        return True

    def load(self, kept: Kept) -> None:
        """Bring a request's copy back in the next plan; the host has none any more."""
        self._loads.append(kept)
        self.num_bytes -= self._copies.pop(kept.request_id).num_bytes

    def drop(self, request_id: int) -> None:
        """The request will not come back, or must compute everything again."""
        copy = self._copies.pop(request_id, None)
        if copy is None:
            return
        self.num_bytes -= copy.num_bytes
        if copy.step is None:
            self._saves = [kept for kept in self._saves if kept.request_id != request_id]
        else:
            self._drops.append(request_id)

    @property
    def planned(self) -> tuple[tuple[Kept, ...], tuple[Kept, ...], tuple[int, ...]]:
        """What the next step saves, loads and drops."""
        return tuple(self._saves), tuple(self._loads), tuple(self._drops)

    def launched(self, step: int) -> None:
        """`step` does what was planned. A request can rely on its copy when that commits."""
        if self._saves or self._loads or self._drops:
            self._saves, self._loads, self._drops = [], [], []
        for copy in self._copies.values():
            if copy.step is None:
                copy.step = step

    def start_over(self, void: Iterable[StepPlan], committed: int) -> None:
        """The plans `void` do not count, nor does what is planned since: only copies that a step up to `committed` has
        made can be relied on. All others are dropped, wherever those steps stopped."""
        gone = {request_id for plan in void for request_id in plan.host.drops}
        gone |= {kept.request_id for plan in void for kept in (*plan.host.saves, *plan.host.loads)}
        gone |= {*self._drops, *(kept.request_id for kept in (*self._saves, *self._loads))}
        gone |= {id for id, copy in self._copies.items() if copy.step is None or copy.step > committed}
        for request_id in gone & self._copies.keys():
            self.num_bytes -= self._copies.pop(request_id).num_bytes
        self._saves, self._loads, self._drops = [], [], sorted(gone)
