"""The memory of the tiers of the prefix cache behind the device, and the copies that plans ask of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.base.log import event, get_logger
from forebay.memory.slots import Ids
from forebay.memory.tier import DEVICE, HOST
from forebay.pools.mover import Mover, Places, Rows, checksums
from forebay.requests.step_plan import StepPlan, TierCopy

log = get_logger("tiers")


class LostRows(Exception):
    """Rows of a tier cannot be read, or are not what was written."""


class TierStore(Protocol):
    """The rows of one tier by kind of cache and slot."""

    def store(self, copy: TierCopy, rows: Rows) -> None:
        """Keep rows in the slots `copy.there`. `rows` belong to the store from then on. Raises LostRows, and keeps
        none of them."""

    def fetch(self, copy: TierCopy) -> Rows:
        """Return the rows of the slots `copy.there`. Raises LostRows."""


class _Arriving(NamedTuple):
    """Rows that the device may still be writing."""

    rows: Rows
    there: Mapping[str, Ids]
    written: torch.cuda.Event | None


class HostStore:
    """A tier in host memory. Of a GPU the memory is pinned, and a store waits for no copy that is under way.

    Each row has the checksum of what arrived from the device, compared whenever the row is fetched (C30).
    """

    def __init__(self, mover: Mover, num_slots: Mapping[str, int], *, pinned: bool = False) -> None:
        self._rows: dict[str, Tensor] = {
            kind: torch.empty((num + 1, mover.row_bytes[kind]), dtype=torch.uint8, pin_memory=pinned)
            for kind, num in num_slots.items()
        }
        self._sums = {kind: np.zeros(num + 1, dtype=np.uint64) for kind, num in num_slots.items()}
        self._mover = mover
        self._arriving: deque[_Arriving] = deque()

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def store(self, copy: TierCopy, rows: Rows) -> None:
        """Keep rows; those of a GPU are put into their slots once they have arrived."""
        self._arriving.append(_Arriving(rows, copy.there, self._mover.copied()))
        self._settle(wait=False)

    def fetch(self, copy: TierCopy) -> Rows:
        """Return the rows, after those that have not arrived yet."""
        self._settle(wait=True)
        return {kind: self._checked(kind, ids) for kind, ids in copy.there.items()}

    def _checked(self, kind: str, ids: Ids) -> Tensor:
        rows = torch.from_numpy(self._rows[kind].numpy()[ids])
        differ = self._sums[kind][ids] != np.array(checksums(rows), dtype=np.uint64)
        if differ.any():
            reason = f"the checksum of {kind} in slot {ids[differ][0]} differs"
            log.warning(event("prefix_rows_lost", tier=HOST, reason=reason))
            raise LostRows(reason)
        return rows

    def _settle(self, *, wait: bool) -> None:
        """Put rows that have arrived into their slots, in order."""
        while self._arriving:
            rows, there, written = self._arriving[0]
            if written is not None and not written.query():  # type: ignore[no-untyped-call]
                if not wait:
                    return
                written.synchronize()
            self._arriving.popleft()
            for kind, ids in there.items():
                self._rows[kind].numpy()[ids] = rows[kind].numpy()
                self._sums[kind][ids] = checksums(rows[kind])


class TierStores:
    """The stores of all tiers by name. `lost` are the numbers of the copies that failed, until `take_lost`."""

    def __init__(self, mover: Mover, stores: Mapping[str, TierStore]) -> None:
        self._mover, self._stores = mover, stores
        self._lost: list[int] = []

    def store(self, copy: TierCopy, places: Places) -> None:
        """Copy slots of the device to a tier, or note that they are lost."""
        try:
            self._stores[copy.tier].store(copy, self._mover.read(places))
        except LostRows:
            self._lost.append(copy.number)

    def fetch(self, copy: TierCopy, places: Places) -> None:
        """Copy rows of a tier to the device, or note that they are lost."""
        try:
            rows = self._stores[copy.tier].fetch(copy)
        except LostRows:
            self._lost.append(copy.number)
            return
        self._mover.write(rows, places)

    def take_lost(self) -> tuple[int, ...]:
        """Return the numbers of the copies that failed since the last call."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def differing(
        self, tier: str, there: Mapping[str, Ids], here: Mapping[str, Ids]
    ) -> dict[str, npt.NDArray[np.bool_]] | None:
        """Return by kind which rows of a tier differ from those of as many slots of the device; None if they cannot be
        read. No step is in flight."""
        try:
            rows = self._read(tier, there)
        except LostRows:
            return None
        return {kind: _differ(rows[kind], own) for kind, own in self._read(DEVICE, here).items()}

    def _read(self, tier: str, slots: Mapping[str, Ids]) -> Rows:
        if tier != DEVICE:
            return self._stores[tier].fetch(TierCopy(number=0, tier=tier, slots={}, there=dict(slots)))
        rows = self._mover.read(self._mover.places(slots))
        self._mover.wait()
        return rows

    def check(self, plan: StepPlan) -> None:
        """Raise KeyError for a copy of a tier that does not exist, before anything is done."""
        for copy in (*plan.host.stores, *plan.host.fetches):
            self._stores[copy.tier]


def _differ(rows: Tensor, others: Tensor) -> npt.NDArray[np.bool_]:
    """Return for each row whether a byte of it differs."""
    if torch.equal(rows, others):
        return np.zeros(len(rows), dtype=np.bool_)
    differ: npt.NDArray[np.bool_] = (rows != others).any(dim=1).numpy()
    return differ
