"""What a plan does to the caches before the model runs, and what the model is told of states and windows, against
lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.config.engine_config import CacheTypes
from forebay.layers.context import ForwardContext
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention, LatentAttention, RecurrentState, SlidingWindow
from forebay.pools.request_rows import RequestRows
from forebay.requests.step_plan import HostCopy, StepPlan
from forebay.runtime.sampling.row_options import Sampling
from forebay.runtime.sampling.sampler import Wants
from forebay.runtime.steps.forward import Forward, StepTokens
from forebay.runtime.steps.inputs import Shape, StepInputs
from tests.plans import changed
from tests.runtime.fake_model import FakeModel
from tests.runtime.plans import ids
from tests.runtime.test_step_inputs import NUM_ROWS, PAGE_SIZE, PAGES, random_plan, tokens_on_device

SPECS = (
    RecurrentState(conv=(2, 3), ssm=(2, 2)),
    FullAttention(num_kv_heads=1, head_dim=2),
    SlidingWindow(num_kv_heads=1, head_dim=2, window=6),
    LatentAttention(rank=2, rope_dim=1),
    RecurrentState(conv=(3, 1)),
)
NUM_PAGES, NUM_WINDOWS, NUM_SLOTS = 98, 12, 40


class Lists:
    """The pools by page, window page and slot: one number each, which fills every tensor there."""

    def __init__(self) -> None:
        self.pages, self.windows, self.slots = ([0.0] * (n + 1) for n in (NUM_PAGES, NUM_WINDOWS, NUM_SLOTS))
        self.by_kind = {"kv": self.pages, "window": self.windows, "state": self.slots}
        self.on_host: dict[int, dict[str, list[float]]] = {}
        self.table = np.zeros((NUM_ROWS + 1, PAGES), dtype=np.int64)
        self.full_to_window = [0] * (NUM_PAGES + 1)

    def apply(self, plan: StepPlan) -> None:
        for copy in plan.host.saves:
            self.on_host[copy.request_id] = {
                kind: [self.by_kind[kind][i] for i in ids] for kind, ids in copy.slots.items()
            }
        for request_id in plan.host.drops:
            self.on_host.pop(request_id, None)
        self.table[plan.writes.write_rows, plan.writes.write_columns] = plan.writes.write_pages
        for page, window in zip(
            plan.kinds.window.map_pages.tolist(), plan.kinds.window.map_windows.tolist(), strict=True
        ):
            self.full_to_window[page] = window
        for slot in plan.kinds.state.clears:
            self.slots[slot] = 0.0
        for src, dst in zip(plan.kinds.state.copy_src, plan.kinds.state.copy_dst, strict=True):
            self.slots[dst] = self.slots[src]
        for copy in plan.host.loads:
            saved = self.on_host.pop(copy.request_id)
            for kind, slots in copy.slots.items():
                for slot, value in zip(slots.tolist(), saved[kind], strict=True):
                    self.by_kind[kind][slot] = value


def tensors(cache: CachePool, lists: Lists) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor, and what the list that it belongs to says about it."""
    for i, spec in enumerate(SPECS):
        if isinstance(spec, RecurrentState):
            of_layer, entries = cache.state(i), lists.slots
        else:
            of_layer, entries = cache.kv(i)[:2], lists.windows if isinstance(spec, SlidingWindow) else lists.pages
        for tensor in of_layer:
            rows = torch.tensor(entries).repeat_interleave(tensor.shape[0] // len(entries))
            yield tensor, rows.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape)


def random_copy(rng: np.random.Generator, request_id: int) -> HostCopy:
    pages, windows = rng.permutation(NUM_PAGES)[:5] + 1, rng.permutation(NUM_WINDOWS)[:3] + 1
    slot = rng.integers(1, NUM_SLOTS + 1, 1)
    return HostCopy(request_id=request_id, slots={"kv": pages, "window": windows, "state": slot})


def random_hybrid_plan(rng: np.random.Generator, step: int, on_host: set[int]) -> StepPlan:
    plan = random_plan(rng, step)
    slots = rng.permutation(NUM_SLOTS) + 1
    places = [(i, n) for i in range(plan.num_extends) for n in range(plan.starts[i] + 1, plan.ends[i] + 1)]
    places = [place for place in places if rng.random() < 0.3][:10]
    wishes = [(i, int(rng.integers(1, 4))) for i in range(plan.num_extends, plan.num_seqs) if rng.random() < 0.6]
    snapshots = np.array(places + wishes, dtype=np.int64).reshape(-1, 2)
    mapped = rng.permutation(NUM_PAGES)[: int(rng.integers(0, 4))] + 1
    cleared, copied = (int(n) for n in rng.integers(0, 3, 2))
    saved = {int(i) for i in rng.integers(0, 9, 2)} - on_host
    there = sorted(on_host | saved)
    return changed(
        plan,
        map_pages=mapped,
        map_windows=rng.integers(0, NUM_WINDOWS + 1, len(mapped)),
        state_slots=slots[: plan.num_seqs],
        snap_seqs=snapshots[:, 0],
        snap_lens=snapshots[:, 1],
        snap_slots=slots[10 : 10 + len(snapshots)],
        clears=slots[30 : 30 + cleared],
        copy_src=slots[:copied],
        copy_dst=slots[35 : 35 + copied],
        saves=tuple(random_copy(rng, i) for i in saved),
        drops=tuple(i for i in (20, *there[1:]) if rng.random() < 0.3),
        loads=tuple(random_copy(rng, i) for i in there[:1]),
    )


def check_tokens(plan: StepPlan, tokens: StepTokens, ctx: ForwardContext, rows: RequestRows) -> None:
    cache = ctx.cache
    states, placed = tokens.kinds["state"].batch, tokens.placed
    pages, inside = placed.out_cache_loc // PAGE_SIZE, placed.out_cache_loc % PAGE_SIZE
    windows = cache.page_maps["window"][pages] * PAGE_SIZE + inside
    assert ctx.pages("window").out_cache_loc.tolist() == windows.tolist()
    assert ctx.pages("kv").out_cache_loc.tolist() == placed.out_cache_loc.tolist()
    assert states.slots.tolist() == plan.kinds.state.state_slots.tolist()
    got = [
        (i, int(placed.positions[states.snap_ends[j] - 1]) + 1, int(states.snap_slots[j]))
        for i in range(plan.num_seqs)
        for j in range(int(states.snap_start[i]), int(states.snap_start[i + 1]))
    ]
    expected = []
    for i, length, slot in zip(
        plan.kinds.state.snap_seqs, plan.kinds.state.snap_lens, plan.kinds.state.snap_slots, strict=True
    ):
        reached = length if i < plan.num_extends else int(rows.kv_lens[plan.rows[i]]) + 1
        expected.append((i, reached, slot if reached == length else 0))
    assert got == expected
    ints = {field.name: getattr(states, field.name).dtype for field in dataclasses.fields(states)}
    assert ints.pop("positions") is torch.int64
    assert set(ints.values()) == {torch.int32}
    assert states.positions.tolist() == placed.positions.tolist()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), max_num_tokens=st.sampled_from([1, 100]))
def test_changes_of_random_plans_in_a_row_are_those_of_lists(seed, max_num_tokens):
    """C6, C26: in the promised order, in every tensor of every layer, and nowhere else."""
    rng, lists = np.random.default_rng(seed), Lists()
    cache = CachePool(
        SPECS,
        CacheTypes(),
        page_size=PAGE_SIZE,
        num_slots={"kv": NUM_PAGES, "window": NUM_WINDOWS, "state": NUM_SLOTS},
        device="cpu",
    )
    rows = RequestRows(NUM_ROWS, PAGES)
    rows.kv_lens.copy_(torch.from_numpy(rng.integers(0, 3, NUM_ROWS + 1)))
    forward = Forward(FakeModel(), Ops(1), rows, cache)
    staging = StepInputs(forward, forward.cache.mover, max_num_tokens=max_num_tokens)
    for step in range(5):
        for entries in (lists.pages, lists.windows, lists.slots):  # as if a model had written everywhere
            entries[:] = rng.integers(1, 1 << 20, len(entries)).astype(float).tolist()
        for tensor, expected in tensors(cache, lists):
            tensor.copy_(expected)
        plan = random_hybrid_plan(rng, step, set(lists.on_host))
        plan = changed(plan, loads=tuple(k for k in plan.host.loads if k.request_id not in plan.host.drops))
        staging.copies.check(plan)
        lists.apply(plan)
        inputs = staging.stage(plan, Shape.TOKENS, Sampling(plan.rows[plan.sample_mask], Wants.GREEDY), ids([]))
        tokens = tokens_on_device(plan, staging, inputs, forward)
        check_tokens(plan, tokens, forward.context(tokens), rows)
        assert rows.req_to_token.tolist() == lists.table.tolist()
        assert cache.page_maps["window"].tolist() == list(lists.full_to_window)
        for tensor, expected in tensors(cache, lists):
            assert torch.equal(tensor, expected)
        assert staging.copies.num_bytes == len(lists.on_host) * copy_bytes()


def copy_bytes() -> int:
    full, window, latent, state = 5 * PAGE_SIZE * 4, 3 * PAGE_SIZE * 4, 5 * PAGE_SIZE * 3, (6 + 4) + 3
    return 4 * (full + window + latent + state)
