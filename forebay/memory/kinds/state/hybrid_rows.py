"""State slots of recurrent layers: handed out with a request's row, with slots to track it in (C3, C4, C6, C7); and how
many memory is divided into.

Slots are ids here; their bytes live in `pools.cache_pool`. What a slot must become before the next step reads it, zeros
or the copy of another, is written into that step's draft and done in order: after the steps launched before, and before
the plan's own model step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from forebay.base import log
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import Ledger
from forebay.memory.budget import BudgetLine, Decided, KindDemand, MemoryBudget, MemoryDemand
from forebay.memory.draft import Draft
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool, RowHolder
from forebay.memory.slots import NO_SLOT, Ids, OutOfSlots, Slots, as_ids

_log = log.get_logger("memory")

STATE: Final = "state"
# Cached states nearer to each other than this save less than a step's work. It only bounds what is set aside for them.
_SPACING_TOKENS: Final = 16


class MambaPool(Slots):
    """`size` state slots; slot 0 is the padding slot and is never handed out."""

    def __init__(self, size: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        super().__init__(STATE, size, ledger=ledger)
        self.size = size

    def alloc(self, n: int, owner: int) -> list[int]:
        """Take n slots; what they hold is undefined until `clear_state` or `copy_from`. Raises OutOfSlots."""
        if n == 1:
            return [self.take_one(owner)]
        slots: list[int] = self.take_ids(n, owner).tolist()
        return slots

    def free(self, slots: Sequence[int] | Ids, owner: int) -> None:
        self.return_ids(np.asarray(slots, dtype=np.int64), owner)

    def available_size(self) -> int:
        return self.num_free

    def clear_state(self, slot: int, draft: Draft) -> None:
        """The step begins by making the slot zeros: its request starts from nothing."""
        draft.clears.append(slot)

    def copy_from(self, src: int, dst: int, draft: Draft) -> None:
        """The step begins by copying slot `src` to `dst`. The caller keeps `src` from being released until it has
        completed."""
        draft.copies.append((src, dst))


class HybridReqToTokenPool(ReqToTokenPool):
    """`size` rows over `mamba_size` state slots, of which a request takes 1 + `num_tracking`, together with its row.

    `req_index_to_mamba_index_mapping` is int32 `[rows + 1]`, `req_index_to_mamba_ping_pong_track_buffer_mapping` int32
    `[rows + 1, tracking slots]`: sized by rows, whatever the number of slots. Row 0 maps to slot 0. Both are views of
    one table.
    """

    def __init__(self, size: int, max_context_len: int, *, mamba_size: int, num_tracking: int, **others: Any) -> None:
        super().__init__(size, max_context_len, **others)
        self.mamba_pool = MambaPool(mamba_size, ledger=self.slots.ledger)
        self.num_tracking, self.slots_per_req = num_tracking, 1 + num_tracking
        self._row_slots = np.zeros((self.slots.num_rows, self.slots_per_req), dtype=np.int32)
        self.req_index_to_mamba_index_mapping = self._row_slots[:, 0]
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = self._row_slots[:, 1:]

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
        if len(new) == 1:  # from the group, if there is one
            self._row_slots[new[0].row] = [pool.take_one(new[0].id) for _ in range(width)]
        elif new:
            owners = np.repeat(as_ids([req.id for req in new]), width)
            self._row_slots[[req.row for req in new]] = pool.take_ids(need, owners).reshape(-1, width)
        return rows

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
        free = np.ones(self.slots.num_rows, dtype=bool)
        free[rows] = False
        assert not self._row_slots[free].any(), "a free row, or the padding row, has a state slot or a tracking slot"

    @contextmanager
    def group(self, n: int) -> Iterator[None]:
        """One allocation group for n admissions: rows and slots (C7)."""
        with ExitStack() as groups:
            groups.enter_context(super().group(n))
            groups.enter_context(self.mamba_pool.group(n * self.slots_per_req))
            yield


class HybridMambaDecodeReqToTokenPool(HybridReqToTokenPool, DecodeReqToTokenPool):
    """Rows of a decode server for a model with recurrent layers: pre-allocated requests hold slots, too (C2, C4)."""

    def __init__(self, size: int, max_context_len: int, *, pre_alloc_size: int, mamba_size: int, **others: Any) -> None:
        effective = effective_mamba_size(mamba_size, size + pre_alloc_size, others["num_tracking"])
        super().__init__(size, max_context_len, mamba_size=effective, pre_alloc_size=pre_alloc_size, **others)


def effective_mamba_size(configured: int, num_reqs: int, num_tracking: int) -> int:
    """Return the state slots for `num_reqs` concurrent requests: the configured number, or the number that they need if
    that is larger (C4).

    Call it before memory is divided, so that a larger need is logged at the start.
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


def tracking_slots(extra_buffer: bool, depth: int) -> int:
    """State slots that a request tracks its state in: none without the extra buffer; with overlap two, so that a step
    in flight writes one while the other's state is complete."""
    return 0 if not extra_buffer else 2 if depth else 1


@dataclass(frozen=True, kw_only=True)
class StateDemand(KindDemand):
    """Slots for live states, `num_tracking` tracked ones of each request, and with `cached` those of the prefix cache.
    `configured` None: by `ratio`, of their bytes to those of KV. `raised` is that of a decode server, to what all its
    requests need, which is certain before memory is divided (C4)."""

    name: ClassVar[str] = STATE
    unit: ClassVar[str] = "state slots"
    settings: ClassVar[frozenset[str]] = frozenset(
        {
            *("mamba_ssm_dtype", "mamba_scheduler_strategy", "mamba_track_interval", "anchor_interval"),
            *("max_mamba_cache_size", "mamba_full_memory_ratio"),
        }
    )
    sized_by: ClassVar[str] = "max_mamba_cache_size"
    absent: ClassVar[str] = "no layer keeps a state"

    num_tracking: int
    cached: bool
    configured: int | None = None
    raised: int = 0
    ratio: float

    @property
    def per_request(self) -> int:
        """The live state, those being tracked, and one in the prefix cache to come back to."""
        return 1 + self.num_tracking + self.cached

    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        return num_requests * self.per_request

    def most_requests(self, demand: MemoryDemand) -> Decided:
        slots = max(self._share(demand, 1), self.configured or 0, self.raised)
        return max(1, slots // self.per_request), f"{slots} state slots, {self.per_request} for each request"

    def num_slots(self, demand: MemoryDemand, rows: int, given: Mapping[str, int]) -> Decided:
        needed, useful = self.least(demand, rows), self._useful(demand, rows)
        others = demand.least_bytes(rows, {**given, self.name: 0})
        affordable = (demand.kv_cache_bytes - others) // self.slot_bytes - 1
        why_useful = f"more could not be of use beside the KV: one for every {_spacing(demand)} tokens"
        if self.configured is not None:
            asked = f"--max-mamba-cache-size {self.configured}"
            wanted = self.raised or max(self.configured, needed)
            if wanted > useful and useful <= affordable:
                return useful, f"{asked}, lowered: {why_useful}"
            if wanted > affordable:
                return affordable, f"{asked}, lowered: {human_bytes(demand.kv_cache_bytes)} in all"
            return wanted, f"{asked}, raised to what {rows} requests need" if wanted > self.configured else asked
        share = self._share(demand, rows)
        slots = min(max(needed, min(share, useful)), affordable)
        ratio = f"{self.ratio:g} times the memory of KV (--mamba-full-memory-ratio)"
        reasons = {
            needed: f"what {rows} requests need",
            share: ratio if demand.keeps_tokens else "no layer keeps KV",
            useful: why_useful,
            affordable: f"all but what {rows} requests need otherwise",
        }
        return slots, reasons[slots]

    def _share(self, demand: MemoryDemand, rows: int) -> int:
        """Return the slots by the ratio of their memory to that of KV; all memory if no layer keeps KV."""
        left = demand.kv_cache_bytes - demand.row_bytes(rows, demand.possible_context)
        if demand.keeps_tokens:
            left = int(left * self.ratio / (1 + self.ratio))
        return max(0, left // self.slot_bytes - 1)

    def _useful(self, demand: MemoryDemand, rows: int) -> int:
        """The running requests', and as many cached states as the KV beside them could be resumed at."""
        running = self.least(demand, rows)
        if not self.cached:
            return running
        spacing, tokens = _spacing(demand), demand.max_total_tokens
        left = demand.kv_cache_bytes - running * self.slot_bytes
        by_memory = left // (spacing * demand.kv_bytes_per_token + self.slot_bytes)
        return running + max(0, by_memory if tokens is None else min(by_memory, ceil_div(tokens, spacing)))

    def log_raised(self, budget: MemoryBudget) -> None:
        if self.configured is not None and not self.raised:
            effective_mamba_size(self.configured, budget.num_rows, self.per_request - 1)

    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        slots = budget.num_slots[self.name]
        num_bytes = human_bytes((slots + 1) * self.slot_bytes)
        parts = [(1, "live"), (self.num_tracking, "tracking"), (int(self.cached), "cached")]
        each = " + ".join(f"{count} {what}" for count, what in parts if count)
        return [
            BudgetLine("state slots", str(slots), reason),
            BudgetLine("slots per request", str(self.per_request), each),
            BudgetLine("states", num_bytes, f"({slots} + 1 padding) slots of {human_bytes(self.slot_bytes)}"),
        ]

    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        return budget.num_slots[self.name] - num_running * (1 + self.num_tracking)


def _spacing(demand: MemoryDemand) -> int:
    return max(demand.page_size, _SPACING_TOKENS)
