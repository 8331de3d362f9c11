"""Compressed KV on the hash model's device, by the real ops: entries in pages, and the states of open blocks in rings
(C24).

A token's states follow from its chain value in the KV that the hash model reads. What each sequence of a step sees as
entries must be what those tokens compress to, wherever the step, its request and its pages have been.

Shape letters: T tokens, C channels of a token's state, Q rings of R places, N blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.base.parts import I64
from forebay.memory.kinds.ring.rings import RING
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kv_allocator import KV
from forebay.ops.interface import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.compression import Compression, TokenRing
from forebay.pools.cache_spec import BlockStates, OverlappingBlockStates
from tests.kernels import VARIANTS, native_ops
from tests.pools.caches import cache_types
from tests.simulation.device_memory import POISON, RunnerError
from tests.simulation.hashing import U64, mix_array

if TYPE_CHECKING:
    from tests.simulation.hash_runner import HashRunner
    from tests.simulation.hash_step import HashStep

Floats = npt.NDArray[np.float32]

_MOST_ERROR: Final = 1e-5  # another token's state differs by more


@cache
def _ops() -> Ops:
    """The native ops where there are some: many steps are run."""
    return native_ops(VARIANTS[0], 1) if VARIANTS else Ops(1)


class Entries:
    """One layer's entries and rings. Entries [L, 1] are kept at the location of their block's first token.

    Rings are by request row or, with overlap, by window page: of `how.ring` places, or a place for each of a page's
    tokens where pages move to engines with others.
    """

    def __init__(self, how: Compression, num_locations: int, num_rings: int) -> None:
        self.how, channels = how, 2 if how.overlap else 1
        self.entries = np.full(num_locations, np.nan, dtype=np.float32)
        self.kv, self.gate = (np.full((num_rings, how.ring, channels), np.nan, dtype=np.float32) for _ in range(2))
        self._bias = np.random.default_rng(how.rate).normal(size=(how.rate, channels)).astype(np.float32)

    def run(self, positions: I64, loc: I64, paged: PagedKv, chain: U64) -> None:
        """Compress the step's T tokens, of which chain [T] is what the KV has."""
        values, gates = (torch.from_numpy(part) for part in self._states(chain))
        rings = TokenRing(torch.from_numpy(self.kv), torch.from_numpy(self.gate))
        blocks = _ops().compression.plan_blocks(torch.from_numpy(positions), torch.from_numpy(loc), paged, self.how)
        entries = _ops().compression.compress(values, gates, torch.from_numpy(self._bias), rings, blocks)
        self.entries[blocks.loc.numpy() * self.how.rate] = entries[:, 0].numpy()
        self.entries[: paged.page_size] = self.kv[0] = self.gate[0] = np.nan  # padding: nobody's

    def expected(self, chain: U64) -> Floats:
        """Return the entries [N] of the whole blocks of a sequence's tokens, of which chain is what the KV has."""
        rate, count = self.how.rate, len(chain) // self.how.rate
        values, gates = (part[: count * rate].reshape(count, rate, part.shape[1]) for part in self._states(chain))
        if not count:
            return np.empty(0, dtype=np.float32)
        gates = gates + self._bias
        if self.how.overlap:
            before = np.concatenate([np.full((1, rate), -np.inf, dtype=np.float32), gates[:-1, :, 0]])
            gates = np.concatenate([before, gates[:, :, 1]], axis=1)
            earlier = np.concatenate([np.zeros((1, rate), dtype=np.float32), values[:-1, :, 0]])
            values = np.concatenate([earlier, values[:, :, 1]], axis=1)
        else:
            values, gates = values[:, :, 0], gates[:, :, 0]
        weights = np.exp(gates - gates.max(axis=1, keepdims=True))
        result: Floats = (values * weights).sum(axis=1) / weights.sum(axis=1)
        return result

    def _states(self, chain: U64) -> tuple[Floats, Floats]:
        """Return values and gates [T, C] of tokens, between 0 and 1."""
        channels = np.arange(1, 1 + 2 * self.kv.shape[-1], dtype=np.uint64)
        mixed = mix_array(chain[:, None] + channels) >> np.uint64(40)
        values, gates = np.split(mixed.astype(np.float32) / np.float32(1 << 24), 2, axis=1)
        return np.ascontiguousarray(values), np.ascontiguousarray(gates)


class RingMemory:
    """Of one runner. `rates` are the tokens of an entry in a layer whose rings are by row, and in one whose blocks
    overlap, if the model has a window that is long enough. `width` is the most tokens that a step may have rejected."""

    def __init__(self, runner: HashRunner, *, rates: tuple[int, int], width: int, movable: bool) -> None:
        self._runner = runner
        num_locations, num_rows = len(runner.kv), runner.pools.rows.num_rows
        types = replace(cache_types(torch.float32), width=width, movable=movable)
        rate, overlapping = rates
        ring = BlockStates(rate=rate, width=1).ring(types)
        self.by_row = Entries(Compression(rate=rate, overlap=False, ring=ring, by_row=True), num_locations, num_rows)
        self.by_page: Entries | None = None
        if runner.windows and runner.windows.window >= 2 * overlapping:
            ring = runner.page_size if movable else OverlappingBlockStates(rate=overlapping, width=2).ring(types)
            by_page = Compression(rate=overlapping, overlap=True, ring=ring, by_row=False)
            self.by_page = Entries(by_page, num_locations, runner.windows.bytes.slots.num_rows)
        self.num_steps = self.num_entries = self.num_overlapping = 0

    @property
    def _layers(self) -> Iterator[Entries]:
        yield self.by_row
        if self.by_page:
            yield self.by_page

    def by_kind(self) -> Mapping[str, list[Floats]]:
        """Return everything by kind of cache and slot: what moves with a page, a window page or a row."""
        size = self._runner.page_size
        found: dict[str, list[Floats]] = {
            KV: [own.entries.reshape(-1, size) for own in self._layers],
            RING: [self.by_row.kv, self.by_row.gate],
        }
        if self.by_page:
            found[WINDOW] = [self.by_page.kv, self.by_page.gate]
        return found

    # -- what happens to slots ----------------------------------------------------------------------------------------

    def copy(self, slots: Mapping[str, I64]) -> dict[str, list[Floats]]:
        """Return what is kept in these slots, by kind."""
        return {
            kind: [own[slots[kind]].copy() for own in parts] for kind, parts in self.by_kind().items() if kind in slots
        }

    def put(self, slots: Mapping[str, I64], copied: Mapping[str, list[Floats]]) -> None:
        """Write what was copied into other slots."""
        memories = self.by_kind()
        for kind, parts in copied.items():
            for memory, part in zip(memories[kind], parts, strict=True):
                memory[slots[kind]] = part

    def spoil(self, step: HashStep) -> None:
        """Leave garbage wherever a step that fails was to write."""
        plan = step.plan
        for own in self._layers:
            own.entries[step.out_cache_loc] = np.nan
        slots = {RING: plan.rows}
        if self.by_page:
            slots[WINDOW] = step.out_window_loc // self._runner.page_size
        self.forget(slots)

    def forget(self, slots: Mapping[str, I64]) -> None:
        """Leave garbage in these slots."""
        memories = self.by_kind()
        for kind, ids in slots.items():
            for memory in memories.get(kind, ()):
                memory[ids] = np.nan

    def poison(self) -> None:
        """Leave nothing of what the device had."""
        for memories in self.by_kind().values():
            for memory in memories:
                memory[:] = np.nan

    def poison_free(self) -> None:
        """Poison the pages that the runner has poisoned."""
        runner, kinds = self._runner, self.by_kind()
        pages = {KV: runner.pages, **({WINDOW: runner.windows.bytes} if runner.windows else {})}
        for kind, words in pages.items():
            free = (words.by_slot == POISON).all(axis=1)
            for memory in kinds.get(kind, ()):
                memory[free] = np.nan

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, step: HashStep) -> None:
        """Compress the step's tokens, and check all entries that its sequences see."""
        runner, plan = self._runner, step.plan
        self.num_steps += 1
        positions, chain = step.starts[step.which] + step.inside, runner.kv[step.out_cache_loc]
        table = np.zeros_like(runner.table)  # as it was at the launch
        table[plan.rows, : step.pages.shape[1]] = step.pages
        window_map = torch.from_numpy(runner.windows.full_to_window.copy()) if runner.windows else None
        for own in self._layers:
            own.run(
                positions, step.out_cache_loc, self._paged(step, table, None if own.how.by_row else window_map), chain
            )
        ends = step.starts + plan.q_lens
        for i, (tenant, end) in enumerate(zip(step.tenants.tolist(), ends.tolist(), strict=True)):
            if tenant not in runner.broken:
                self._check(step, i, runner.kv[step.locations[i, :end]])

    def _paged(self, step: HashStep, table: npt.NDArray[np.int32], page_map: Tensor | None) -> PagedKv:
        plan = step.plan
        return PagedKv(
            page_table=torch.from_numpy(table),
            rows=torch.from_numpy(plan.rows.astype(np.int32)),
            q_start=torch.from_numpy(np.concatenate([[0], np.cumsum(plan.q_lens)]).astype(np.int32)),
            seq_lens=torch.from_numpy((step.starts + plan.q_lens).astype(np.int32)),
            page_size=self._runner.page_size,
            out_cache_loc=torch.from_numpy(step.out_cache_loc.copy()),
            page_map=page_map,
        )

    def _check(self, step: HashStep, i: int, chain: U64) -> None:
        for own in self._layers:
            right = own.expected(chain)
            read = own.entries[step.locations[i, : len(right) * own.how.rate : own.how.rate]]
            self.num_entries += len(right)
            self.num_overlapping += len(right) * own.how.overlap
            wrong = np.flatnonzero(~(np.abs(read - right) <= _MOST_ERROR))
            if len(wrong):
                kind = "an overlapping entry" if own.how.overlap else "an entry"
                at = f"of block {wrong[0]} of {len(right)}, of {own.how.rate} tokens each"
                raise RunnerError(
                    f"step {step.plan.step}: request {step.tenants[i]} reads {kind} of other tokens, {at}"
                )
