"""A fake model that keeps all three kinds of things, and plans for it: windows that move, states, host copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.layers.states import States
from forebay.memory.budget import PoolSizes
from forebay.memory.slots import PAD
from forebay.models.decoder import Model
from forebay.ops import Ops
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_pool import StateLayer
from forebay.pools.cache_spec import CacheSpec, RecurrentState, SlidingWindow
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import HostCopy, Launched, StepPlan, StepResult
from forebay.runtime import ModelRunner, build_runner
from tests.plans import changed
from tests.pools.caches import cache_types
from tests.runtime.fake_model import CONTEXT, HIDDEN, NUM_ROWS, PAGE_SIZE, PAGES_PER_ROW, VOCAB, FakeModel, best_ops
from tests.runtime.plans import Decode, Planner, ids

WINDOW = 6
NUM_WINDOWS = NUM_ROWS * 5  # fewer than pages, so that window pages go round
NUM_SLOTS = 2 * NUM_ROWS
WISH = SamplingParams(temperature=0.0, logprobs=3)


class FakeHybrid(FakeModel):
    """Beside the full KV, which FakeModel reads: a window's and a state's. Its logits depend on every key in the window
    and on every entry of both halves of the state, at each token, with the same arithmetic for every token."""

    def cache_specs(self) -> Sequence[CacheSpec]:
        window = SlidingWindow(num_kv_heads=1, head_dim=HIDDEN, window=WINDOW)
        return (*super().cache_specs(), window, RecurrentState(conv=(HIDDEN, 2), ssm=(2, HIDDEN)))

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        hidden = super().forward(ctx, input_ids)
        x = self._embedding.index_select(0, input_ids)
        k, v, *_ = ctx.cache.kv(1)
        k.index_copy_(0, ctx.pages("window").out_cache_loc, x.unsqueeze(1))
        v.index_copy_(0, ctx.pages("window").out_cache_loc, -x.unsqueeze(1))
        states = States.of(ctx).run(_advance, ctx.cache.state(2), x)
        out = hidden.clone()
        for i in range(len(ctx.full.seq_lens)):
            for t in range(int(ctx.full.q_start[i]), int(ctx.full.q_start[i + 1])):
                out[t, :HIDDEN] += self._window(ctx, i, int(ctx.positions[t])) + states[t]
        return out

    def _window(self, ctx: ForwardContext, i: int, position: int) -> Tensor:
        pages = ctx.pages("window").page_table[int(ctx.pages("window").rows[i])].long()
        if ctx.pages("window").page_map is not None:
            pages = ctx.pages("window").page_map[pages].long()
        mixed = torch.zeros(HIDDEN)
        for read in range(max(0, position - WINDOW + 1), position + 1):
            at = (
                int(pages[read // ctx.pages("window").page_size]) * ctx.pages("window").page_size
                + read % ctx.pages("window").page_size
            )
            mixed = mixed * 0.7 + torch.cos(ctx.cache.kv(1).k[at, 0] * (read + 2)) - ctx.cache.kv(1).v[at, 0]
        return mixed


def _advance(tables: StateLayer, x: Tensor, batch: StateBatch) -> Tensor:
    """The states' part of each token's logits; slot 0 is read and never written."""
    out, weights = torch.zeros_like(x), torch.arange(1.0, 1 + HIDDEN)
    for i, (slot, written) in enumerate(zip(batch.slots.tolist(), batch.write_slots.tolist(), strict=True)):
        conv, ssm = tables.conv[slot], tables.ssm[slot]
        snapshots = range(int(batch.snap_start[i]), int(batch.snap_start[i + 1]))
        for t in range(int(batch.q_start[i]), int(batch.q_stop[i])):
            ssm = torch.sin(ssm.roll(1, dims=1) + conv.T * 0.3 + x[t] * torch.tensor([[1.0], [0.5]]))
            conv = torch.cat([conv[:, 1:], x[t].unsqueeze(1)], dim=1)
            out[t] = (ssm[0] * weights).roll(2) + ssm[1] * 2 + (conv[:, 0] - conv[:, 1]) * 0.5
            for j in snapshots:
                if int(batch.snap_ends[j]) == t + 1 and int(batch.snap_slots[j]) != PAD:
                    tables.conv[int(batch.snap_slots[j])], tables.ssm[int(batch.snap_slots[j])] = conv, ssm
        if written != PAD:
            tables.conv[written], tables.ssm[written] = conv, ssm
    return out


def hybrid_runner(
    model: Model | None = None,
    *,
    vocab_size: int = VOCAB,
    dtype: torch.dtype = torch.float32,
    ssm_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    ops: Ops | None = None,
    device: str = "cpu",
    width: int = 1,
    max_num_tokens: int = 64,
    **graphs: Any,
) -> ModelRunner:
    return build_runner(
        model or FakeHybrid(),
        sizes=PoolSizes(
            num_slots={"kv": NUM_ROWS * PAGES_PER_ROW, "window": NUM_WINDOWS, "state": NUM_SLOTS, "ring": NUM_ROWS},
            page_size=PAGE_SIZE,
            max_running_requests=NUM_ROWS,
            context_length=CONTEXT,
        ),
        ops=ops or best_ops(),
        max_num_tokens=max_num_tokens,
        width=width,
        vocab_size=vocab_size,
        types=replace(cache_types(dtype, ssm_dtype, kv_dtype), chunked_scans=ops is not None and ops.name == "triton"),
        device=device,
        **graphs,
    )


class HybridPlanner(Planner):
    """A row's live slot is `slots[row]`. Windows behind a row's next query are given back after each plan, and handed
    out again at the next."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        super().__init__(runner, page_size=PAGE_SIZE, num_rows=NUM_ROWS, pages_per_row=PAGES_PER_ROW, seed=seed)
        order = torch.randperm(NUM_WINDOWS, generator=torch.Generator().manual_seed(seed)) + 1
        self.free_windows: list[int] = order.tolist()
        self.full_to_window = [PAD] * (NUM_ROWS * PAGES_PER_ROW + 1)
        self.slots = list(range(NUM_ROWS + 1))
        self._clears: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._mapped: list[int] = []
        self.saves: list[HostCopy] = []
        self.loads: list[HostCopy] = []
        self.drops: list[int] = []
        self._saved_lens: dict[int, int] = {}
        self._shared: set[int] = set()

    def begin(self, row: int, tokens: Sequence[int], params: SamplingParams = WISH) -> None:
        """A new request, whose state begins with zeros."""
        self.admit(row, tokens, params)
        self._clears.append(self.slots[row])

    def begin_from(self, row: int, tokens: Sequence[int], source: int, length: int, slot: int) -> None:
        """A new request that shares the pages of `source`'s first tokens, `length` of them, and copies a state."""
        self.admit(row, tokens, WISH)
        self._copies.append((slot, self.slots[row]))
        shared = length // PAGE_SIZE
        self.pages[row, :shared] = self.pages[source, :shared]
        self._writes += [(row, column, int(self.pages[row, column])) for column in range(shared)]
        self._shared.update(self.pages[row, :shared].tolist())
        self.lens[row] = length

    def save(self, row: int) -> None:
        """The request in `row` leaves, and the next plan saves what it has; its windows are free at once."""
        self.saves.append(self._host_copy(row))
        self._saved_lens[row] = int(self.lens[row])
        self.leave(row)

    def leave(self, row: int) -> None:
        self._free_windows(row, PAGES_PER_ROW)

    def load(self, row: int, request_id: int, tokens: Sequence[int]) -> None:
        """The request that left row `request_id`, with all its tokens by now, goes on in `row`."""
        self.admit(row, tokens, WISH)
        length = self.lens[row] = self._saved_lens.pop(request_id)
        count = -(-length // PAGE_SIZE)
        self._writes += [(row, column, int(self.pages[row, column])) for column in range(count)]
        self._take_windows(self.pages[row, max(0, length - WINDOW + 1) // PAGE_SIZE : count].tolist())
        self.loads.append(structs.replace(self._host_copy(row), request_id=request_id))

    def poison(self, live: Sequence[int]) -> None:
        """NaN in every page, window page and state that the rows `live` do not hold; and for pages that lost their
        window, of which the device is not told, windows of others."""
        cache = self.runner.cache
        pages = {int(page) for row in live for page in self.pages[row, : -(-int(self.lens[row]) // PAGE_SIZE)]}
        for i, spec in enumerate(cache.specs):
            if isinstance(spec, RecurrentState):
                held = {self.slots[row] for row in live}
                by_place = [tensor for tensor in cache.state(i) if tensor.numel()]
            else:
                held = {self.full_to_window[page] for page in pages} if isinstance(spec, SlidingWindow) else pages
                by_place = [tensor.unflatten(0, (-1, PAGE_SIZE)) for tensor in cache.kv(i)[:2]]
            for tensor in by_place:
                tensor[torch.tensor([place not in held for place in range(len(tensor))])] = float("nan")
        if "window" in cache.page_maps:
            lost = [page for page, window in enumerate(self.full_to_window) if not window]
            cache.page_maps["window"][torch.tensor(lost)] = 1 + torch.tensor(lost, dtype=torch.int32) % 5

    def _host_copy(self, row: int) -> HostCopy:
        length = int(self.lens[row])
        pages = self.pages[row, : -(-length // PAGE_SIZE)]
        windows = [self.full_to_window[page] for page in pages[max(0, length - WINDOW + 1) // PAGE_SIZE :].tolist()]
        return HostCopy(
            request_id=row, slots={"kv": pages.copy(), "window": ids(windows), "state": ids([self.slots[row]])}
        )

    def plan(
        self,
        extends: Sequence[tuple[int, int]] = (),
        decodes: Sequence[Decode] = (),
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """Snapshots are (row, length, slot)."""
        plan = super().plan(extends, decodes)
        stops = self.lens[plan.rows]
        touched = [
            int(page)
            for row, start, stop in zip(plan.rows, stops - plan.q_lens, stops, strict=True)
            for page in self.pages[row, start // PAGE_SIZE : -(-stop // PAGE_SIZE)]
        ]
        self._take_windows([page for page in dict.fromkeys(touched) if page and not self.full_to_window[page]])
        place = {int(row): i for i, row in enumerate(plan.rows)}
        snaps = sorted((place[row], length, slot) for row, length, slot in snapshots)
        plan = changed(
            plan,
            map_pages=ids(self._mapped),
            map_windows=ids([self.full_to_window[page] for page in self._mapped]),
            state_slots=ids([self.slots[row] for row in plan.rows]),
            snap_seqs=ids([i for i, _, _ in snaps]),
            snap_lens=ids([length for _, length, _ in snaps]),
            snap_slots=ids([slot for _, _, slot in snaps]),
            clears=ids(self._clears),
            copy_src=ids([src for src, _ in self._copies]),
            copy_dst=ids([dst for _, dst in self._copies]),
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            drops=tuple(self.drops),
        )
        for done in (self._mapped, self._clears, self._copies, self.saves, self.loads, self.drops):
            done.clear()
        for i, (row, stop) in enumerate(zip(plan.rows.tolist(), stops.tolist(), strict=True)):
            certain = stop if i < plan.num_extends else stop - int(plan.q_lens[i]) + 1
            self._free_windows(row, max(0, certain - WINDOW + 1) // PAGE_SIZE)
        return plan

    def launch(
        self,
        extends: Sequence[tuple[int, int]] = (),
        decodes: Sequence[Decode] = (),
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> Launched:
        return self.runner.launch(self.plan(extends, decodes, snapshots))

    def step(
        self,
        extends: Sequence[tuple[int, int]] = (),
        decodes: Sequence[Decode] = (),
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> StepResult:
        return self.settle(plan := self.plan(extends, decodes, snapshots), self.runner.launch(plan).result())

    def _take_windows(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.full_to_window[page] = self.free_windows.pop(0)
            self._mapped.append(page)

    def _free_windows(self, row: int, stop: int) -> None:
        """Of the row's first pages; those that rows share are never free."""
        for page in self.pages[row, :stop].tolist():
            if page not in self._shared and self.full_to_window[page]:
                self.free_windows.append(self.full_to_window[page])
                self.full_to_window[page] = PAD
