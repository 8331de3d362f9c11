"""The coordinator of HiSparse, over real caches: newest tokens, resident copies, what a plan may name (C11, C23)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forebay.config.engine_config import CacheTypes
from forebay.memory.kinds.resident.work import ResidentWork
from forebay.memory.slots import as_ids
from forebay.ops.interface import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import IndexKeys, LatentAttention
from forebay.pools.tiers import HotSizes
from forebay.requests.step_plan import KindWork, StepPlan
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.kinds.resident import HisparseCoordinator
from tests.kernels import VARIANTS, native_ops
from tests.ops.triton_device import INTERPRETER_ALONE, TritonOps
from tests.pools.caches import regions_of
from tests.runtime.readbacks import readbacks

PAGE, COLUMNS, ROWS, PAGES, RESIDENT = 4, 6, 3, 8, 2
SPECS = (IndexKeys(head_dim=3), LatentAttention(rank=4, rope_dim=2, sparse=True), LatentAttention(rank=4, rope_dim=2))


@pytest.fixture(params=["torch", "native", pytest.param("triton", marks=INTERPRETER_ALONE)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "triton":
        return TritonOps("cpu", 1)
    return Ops(1) if request.param == "torch" else native_ops(VARIANTS[0], 1)


@pytest.fixture(params=["float32", "int8"])
def cache(request: pytest.FixtureRequest) -> CachePool:
    types = CacheTypes(kv_cache_dtype=request.param, sparse_kv_on_host=True)
    num_slots = {"kv": PAGES, "resident": RESIDENT}
    hot = HotSizes(ROWS + 1, COLUMNS)
    return CachePool(SPECS, types, page_size=PAGE, num_slots=num_slots, device="cpu", hot=hot)


def coordinator(cache: CachePool, ops: Ops) -> HisparseCoordinator:
    return HisparseCoordinator(cache, ops, torch.zeros(1, dtype=torch.int32))


def ids(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def test_map_last_loc_to_buffer_binds_newest_tokens_without_a_readback(cache: CachePool, ops: Ops) -> None:
    """C11: row 2 decodes, row 1 computes its prompt, whose page 5 has a copy, and row 0 is padding."""
    found = coordinator(cache, ops)
    found.change({"admit_rows": ids(1, 2), "hot_rows": ids(2)})
    mirrors = np.array([7, 1]), np.array([1, 2])  # of a decode the host knows that it has a token
    found.change({"resident_pages": ids(5), "resident_slots": ids(2, dtype=torch.int32)})
    lens, locations = ids(7, 11, 1, dtype=torch.int32), ids(5 * PAGE + 2, 3 * PAGE + 2, 0)
    with readbacks() as copies:
        step = found.map_last_loc_to_buffer(lens, locations, ids(1, 2, 0, dtype=torch.int32), *mirrors)
    assert copies == []
    layout = step.layout
    in_row = layout.hot_base + 2 * layout.row_tokens + COLUMNS + 10 % PAGE
    assert step.device_loc.tolist() == [2 * PAGE + 2, in_row, 0]
    assert step.host_loc.tolist() == [layout.host_base + location for location in locations.tolist()]
    assert step.newest.tolist() == [[-1] * PAGE, [-1] * PAGE, [-1, -1, 10, -1], [-1] * PAGE]


@pytest.mark.parametrize(
    ("lens", "rows", "error"),
    [
        ([1], [ROWS + 1], "rows 4..4 of a step; there are 4 hot buffers"),
        ([1], [-1], "rows -1..-1 of a step"),
        ([0], [1], "a sequence of a step has 0 tokens"),
    ],
)
def test_map_last_loc_to_buffer_wrong_host_mirror_is_refused(
    cache: CachePool, ops: Ops, lens: list[int], rows: list[int], error: str
) -> None:
    mirrors = np.array(lens, dtype=np.int64), np.array(rows, dtype=np.int64)
    given: Any = ids(3, dtype=torch.int32), ids(PAGE), ids(1, dtype=torch.int32)
    with pytest.raises(IndexOutOfPool, match=error):
        coordinator(cache, ops).map_last_loc_to_buffer(*given, *mirrors)


def step_of(starts: list[int], q_lens: list[int], rows: list[int], *slots: int) -> StepPlan:
    """Extends behind `starts` first, then decodes."""
    work = KindWork(
        resident=ResidentWork(resident_pages=as_ids([*range(1, len(slots) + 1)]), resident_slots=as_ids(slots))
    )
    num_tokens = sum(q_lens[: len(starts)])
    return StepPlan(
        step=1,
        num_extends=len(starts),
        rows=as_ids(rows),
        q_lens=as_ids(q_lens),
        starts=as_ids(starts),
        input_ids=as_ids([5] * num_tokens),
        sample_mask=np.ones(len(rows), dtype=np.bool_),
        kinds=work,
    )


@pytest.mark.parametrize(
    ("starts", "q_lens", "rows", "error"),
    [
        ([], [1], [ROWS + 1], "there are 4 hot buffers"),
        ([0], [0], [1], "has 0 tokens"),
        ([4], [2, 0], [1, 2], "has 0 tokens"),
    ],
)
def test_check_plan_with_wrong_mirrors_is_refused_before_a_step_is_replayed(
    cache: CachePool, ops: Ops, starts: list[int], q_lens: list[int], rows: list[int], error: str
) -> None:
    with pytest.raises(IndexOutOfPool, match=error):
        coordinator(cache, ops).check(step_of(starts, q_lens, rows))


def test_layer_input_gives_the_plan_s_host_values_and_reads_nothing_back(
    cache: CachePool, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11, C23: a prompt of one token, the first chunk of another, and a decode of which the host knows no more."""
    found, heard, bind = coordinator(cache, ops), [], HisparseCoordinator.map_last_loc_to_buffer

    def listening(self: HisparseCoordinator, *given: Any, **others: Any) -> Any:
        heard.append(given[3:])
        return bind(self, *given, **others)

    monkeypatch.setattr(HisparseCoordinator, "map_last_loc_to_buffer", listening)
    plan = step_of([0, 4], [1, 2, 1], [1, 2, 3])
    positions = ids(0, 4, 5, 7)
    full = PagedKv(
        page_table=torch.zeros(ROWS + 1, 4, dtype=torch.int32),
        rows=ids(1, 2, 3, dtype=torch.int32),
        q_start=ids(0, 1, 3, 4, dtype=torch.int32),
        seq_lens=ids(1, 6, 8, dtype=torch.int32),
        page_size=PAGE,
        out_cache_loc=positions + PAGE,
    )
    with readbacks() as copies:
        found.check(plan)
        step = found.layer_input(full, positions)
    assert copies == []
    assert step is not None
    ((lens, rows),) = heard
    assert (lens.tolist(), rows.tolist()) == ([1, 6, 1], [1, 2, 3])


def test_layer_input_before_the_first_plan_has_no_host_values(cache: CachePool, ops: Ops) -> None:
    """As a graph is captured before any step."""
    full = PagedKv(
        page_table=torch.zeros(ROWS + 1, 4, dtype=torch.int32),
        rows=ids(1, dtype=torch.int32),
        q_start=ids(0, 1, dtype=torch.int32),
        seq_lens=ids(1, dtype=torch.int32),
        page_size=PAGE,
        out_cache_loc=ids(PAGE),
    )
    step = coordinator(cache, ops).layer_input(full, ids(0))
    assert step is not None
    assert step.device_loc.shape == (1,)
    assert coordinator(cache, ops).layer_input(full, None) is None


def test_a_row_that_is_given_out_has_an_empty_hot_buffer(cache: CachePool, ops: Ops) -> None:
    found, tiers = coordinator(cache, ops), cache.tiers
    assert tiers is not None
    for column in tiers.rows.tensors:
        column[1:] = 7
    found.change({"admit_rows": ids(2)})
    for name, pad in (("active", 0), ("newest", -1), ("1.positions", -1), ("1.last_used", 0)):
        assert (tiers.rows[name][2] == pad).all()
        assert (tiers.rows[name][[1, 3]] == 7).all()


def test_resident_copies_are_filled_from_the_host_tier(cache: CachePool, ops: Ops) -> None:
    found, tiers = coordinator(cache, ops), cache.tiers
    assert tiers is not None
    for number, tensor in enumerate(cache.tables["kv"].tensors):
        tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) % 100 + number).to(tensor.dtype))
    found.change({"load_pages": ids(7, 3), "load_slots": ids(1, 2)})
    layer = tiers.of(1)
    assert layer is not None
    assert tiers.of(0) is None
    assert tiers.of(2) is None
    for whole in (layer.kv.k, layer.kv.k_scale):
        if whole is not None:
            on_host = whole[tiers.layout.host_base :].view(PAGES + 1, PAGE, -1)
            copies = whole[: tiers.layout.hot_base].view(RESIDENT + 1, PAGE, -1)
            assert torch.equal(copies[1:], on_host[[7, 3]])
            assert not copies[0].any()


def test_a_plan_with_one_copy_of_two_pages_is_refused(cache: CachePool, ops: Ops) -> None:
    found = coordinator(cache, ops)
    found.check(step_of([], [1], [1], 0, 3, 0, 1))
    with pytest.raises(IndexOutOfPool, match="name a resident page twice"):
        found.check(step_of([], [1], [1], 3, 0, 3))


def test_columns_of_full_kv_are_the_same_with_and_without_tiers(cache: CachePool) -> None:
    """C31: so an engine with HiSparse and one without it are peers."""
    types = CacheTypes(kv_cache_dtype="int8" if cache.tables["kv"]["0.k"].dtype is torch.int8 else "float32")
    dense = CachePool(SPECS, types, page_size=PAGE, num_slots={"kv": PAGES}, device="cpu")
    regions = [(region.name, region.num_rows, region.bytes_per_row) for region in regions_of(dense)]
    assert [(region.name, region.num_rows, region.bytes_per_row) for region in regions_of(cache)] == regions
    assert cache.num_bytes["kv"] == dense.num_bytes["kv"]
    token_bytes = dense.num_bytes["kv"] // (PAGES + 1) // PAGE
    assert 0 < cache.num_bytes["resident"] < (RESIDENT + 1) * PAGE * token_bytes


def test_c14_padding_of_tiers_is_what_it_was_after_it_is_reset(cache: CachePool) -> None:
    tiers = cache.tiers
    assert tiers is not None
    before = [tensor.clone() for tensor in tiers.rows.tensors]
    layer = tiers.of(1)
    assert layer is not None
    for tensor in (*tiers.rows.tensors, layer.kv.k):
        tensor[0] = 9
    cache.reset_padding()
    assert all(torch.equal(tensor, old) for tensor, old in zip(tiers.rows.tensors, before, strict=True))
    assert not layer.kv.k.any()
