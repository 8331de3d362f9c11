"""Request rows of models with recurrent layers: a row comes with a state slot and its tracking slots (C3, C4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from forebay.base import log
from forebay.config.engine_config import Ledger
from forebay.memory.mamba_pool import MambaPool
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool, RowHolder
from forebay.memory.slots import NO_SLOT, OutOfSlots, as_ids

_log = log.get_logger("memory")


class StateRows(ReqToTokenPool):
    """What both hybrid pools have: the mappings from a row to its slots, and handing them out together.

    `req_index_to_mamba_index_mapping` is int32 `[rows + 1]`, `req_index_to_mamba_ping_pong_track_buffer_mapping` int32
    `[rows + 1, tracking slots]`: sized by rows, whatever the number of slots. Row 0 maps to slot 0. Both are views of
    one table.
    """

    mamba_pool: MambaPool
    num_tracking: int
    _row_slots: npt.NDArray[np.int32]
    req_index_to_mamba_index_mapping: npt.NDArray[np.int32]
    req_index_to_mamba_ping_pong_track_buffer_mapping: npt.NDArray[np.int32]

    def _add_states(self, mamba_size: int, num_tracking: int, ledger: Ledger) -> None:
        self.mamba_pool = MambaPool(mamba_size, ledger=ledger)
        self.num_tracking = num_tracking
        self._row_slots = np.zeros((self.slots.num_rows, 1 + num_tracking), dtype=np.int32)
        self.req_index_to_mamba_index_mapping = self._row_slots[:, 0]
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = self._row_slots[:, 1:]

    @property
    def slots_per_req(self) -> int:
        return 1 + self.num_tracking

    def alloc(self, reqs: Sequence[RowHolder]) -> list[int]:
        """Rows as `ReqToTokenPool.alloc`; each new one with its slots, owned by its request. All or nothing.

        A slot's content is undefined: clear it or copy into it before a step reads it.
        """
        new = [req for req in reqs if req.row == NO_SLOT]
        width, pool = self.slots_per_req, self.mamba_pool
        need = len(new) * width
        if need > pool.num_free:
            raise OutOfSlots(pool.name, need, pool.num_free)
        rows = super().alloc(reqs)
        with ExitStack() as undo:
            undo.callback(self._free_rows, new)
            if len(new) == 1:
                self._row_slots[new[0].row] = self._take_one_by_one(width, new[0].id)
            elif new:
                owners = np.repeat(as_ids([req.id for req in new]), width)
                self._row_slots[[req.row for req in new]] = pool.take_ids(need, owners).reshape(-1, width)
            undo.pop_all()
        return rows

    def _free_rows(self, reqs: Sequence[RowHolder]) -> None:
        for req in reqs:
            self.free(req)

    def _take_one_by_one(self, n: int, owner: int) -> list[int]:
        """From the group, if there is one."""
        slots: list[int] = []
        with ExitStack() as undo:
            undo.callback(lambda: self.mamba_pool.free(slots, owner))
            slots.extend(self.mamba_pool.take_one(owner) for _ in range(n))
            undo.pop_all()
        return slots

    def slots_of(self, row: int) -> list[int]:
        """The row's slots, the live one first."""
        slots: list[int] = self._row_slots[row].tolist()
        return slots

    def take_slots(self, row: int) -> list[int]:
        """The row's slots, the live one first, which are now the caller's to free or to give away."""
        slots = self.slots_of(row)
        self._row_slots[row] = NO_SLOT
        return slots

    def clear(self) -> None:
        """Every row and slot is free, and every mapping zero."""
        super().clear()
        self.mamba_pool.clear()
        self._row_slots[:] = NO_SLOT

    def audit(self, rows: Sequence[int]) -> None:
        super().audit(rows)
        free = np.setdiff1d(np.arange(self.slots.num_rows), rows)
        assert not self._row_slots[free].any(), "a free row, or the padding row, has a state slot or a tracking slot"

    @contextmanager
    def group(self, n: int) -> Iterator[None]:
        """One allocation group for n admissions: rows and slots (C7)."""
        with ExitStack() as groups:
            groups.enter_context(super().group(n))
            groups.enter_context(self.mamba_pool.group(n * self.slots_per_req))
            yield


class HybridReqToTokenPool(StateRows):
    """`size` rows over `mamba_size` state slots, of which a request takes 1 + `num_tracking`."""

    def __init__(
        self,
        size: int,
        max_context_len: int,
        *,
        mamba_size: int,
        num_tracking: int,
        page_size: int = 1,
        ledger: Ledger = Ledger.RAISE,
    ) -> None:
        super().__init__(size, max_context_len, page_size=page_size, ledger=ledger)
        self._add_states(mamba_size, num_tracking, ledger)


class HybridMambaDecodeReqToTokenPool(StateRows, DecodeReqToTokenPool):
    """Rows of a decode server for a model with recurrent layers: pre-allocated requests hold slots, too (C2, C4)."""

    def __init__(
        self,
        size: int,
        max_context_len: int,
        *,
        pre_alloc_size: int,
        mamba_size: int,
        num_tracking: int,
        page_size: int = 1,
        ledger: Ledger = Ledger.RAISE,
    ) -> None:
        DecodeReqToTokenPool.__init__(
            self, size, max_context_len, pre_alloc_size=pre_alloc_size, page_size=page_size, ledger=ledger
        )
        effective = effective_mamba_size(mamba_size, size + pre_alloc_size, num_tracking)
        self._add_states(effective, num_tracking, ledger)


def effective_mamba_size(configured: int, num_reqs: int, num_tracking: int) -> int:
    """State slots for `num_reqs` requests at once: what is configured, or what they need if that is more (C4).

    Ask before memory is divided: the need is raised with a warning, not discovered later.
    """
    slots_per_req = 1 + num_tracking
    needed = num_reqs * slots_per_req
    if configured < needed:
        _log.warning(
            log.event(
                "mamba_cache_size_raised",
                configured=configured,
                needed=f"{num_reqs} reqs x {slots_per_req} slots/req = {needed}",
                raised_to=needed,
            )
        )
    return max(configured, needed)
