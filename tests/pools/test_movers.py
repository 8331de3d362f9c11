"""All that copies slots copies every column that the layers of a model declare, of every model type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.config.engine_config import CacheTypes
from forebay.families import TYPES
from forebay.families.model_config import config_of
from forebay.families.small import small_config
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.models import needs_of
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import CacheSpec, Tier
from forebay.pools.mover import Mover
from forebay.pools.table import Table
from forebay.pools.tiers import HotSizes
from forebay.requests.pieces import pieces
from forebay.requests.transfers import Span
from forebay.runtime.host.host_copies import HostCopies
from forebay.transfer.wire.memory import HostMemory, chunk_bytes, shapes_of

PAGE_SIZE = 4
NUM_SLOTS = {"kv": 5, "window": 5, "state": 5, "ring": 5, RESIDENT: 5}
SOURCE, TARGET = [3, 1], [2, 4]
TYPES_OF_CACHES = {
    "float32": CacheTypes(),
    "bfloat16": CacheTypes(dtype="bfloat16", kv_cache_dtype="bfloat16", mamba_ssm_dtype="float32"),
    "int8": CacheTypes(dtype="bfloat16", kv_cache_dtype="int8", mamba_ssm_dtype="bfloat16"),
}


@functools.cache
def specs_of(model_type: str) -> tuple[CacheSpec, ...]:
    fields = small_config(model_type, hidden_size=64, num_layers=4, vocab_size=64)
    return tuple(needs_of(config_of(fields)).cache_specs)


def columns(cache: CachePool, types: CacheTypes) -> Iterator[tuple[str, Tensor]]:
    """Yield each declared column by name, as bytes, without what the movers use to find them."""
    for layer, spec in enumerate(cache.specs):
        for column in spec.columns(types):
            tensor = cache.tables[column.per][f"{layer}.{column.name}"]
            yield f"{column.per} {layer}.{column.name}", tensor.view(len(tensor), -1).view(torch.uint8)


def places(cache: CachePool, slots: list[int]) -> dict[str, Tensor]:
    return {kind: torch.tensor(slots) for kind in cache.tables if cache.has(kind)}


def copy_on_write(cache: CachePool) -> None:
    for table in cache.tables.values():
        table.copy_rows(torch.tensor(SOURCE), torch.tensor(TARGET))


def host_rows(cache: CachePool) -> None:
    """As a sleeping engine, and each tier of the prefix cache."""
    mover = Mover(cache)
    mover.write(mover.read(places(cache, SOURCE)), places(cache, TARGET))


def retraction(cache: CachePool) -> None:
    copies = HostCopies(Mover(cache))
    copies.save(1, places(cache, SOURCE))
    copies.load(1, places(cache, TARGET))


def transfer(cache: CachePool) -> None:
    shapes = shapes_of(cache)
    memory = HostMemory.of(cache, shapes)
    staging = memory.staging(chunk_bytes(shapes))
    for kind, shape in shapes.items():
        here, there = (Span(start=0, ids=np.array(slots)) for slots in (SOURCE, TARGET))
        length = len(SOURCE) * PAGE_SIZE if shape.by_token else len(SOURCE)
        for piece in pieces(kind, shape, here, 0, length):
            at = shape.places(there, piece.first, piece.end)
            memory.scatter(piece._replace(places=at), memory.gather(piece, staging))


MOVERS: dict[str, Callable[[CachePool], None]] = {
    "copy_on_write": copy_on_write,
    "host_rows": host_rows,
    "retraction": retraction,
    "transfer": transfer,
}


def random_cache(specs: tuple[CacheSpec, ...], types: CacheTypes) -> CachePool:
    cache = CachePool(
        specs, types, page_size=PAGE_SIZE, num_slots=NUM_SLOTS, device="cpu", hot=HotSizes(num_rows=2, num_columns=4)
    )
    for _, tensor in columns(cache, types):
        tensor.random_(generator=torch.Generator().manual_seed(1))
    return cache


def check_moved(mover: str, specs: tuple[CacheSpec, ...], types: CacheTypes) -> None:
    cache = random_cache(specs, types)
    before = {name: tensor.clone() for name, tensor in columns(cache, types)}
    try:
        MOVERS[mover](cache)
    except ConfigError:  # entries of compressed KV that a transfer cannot divide into tokens
        assert mover == "transfer"
        return
    for name, tensor in columns(cache, types):
        was = before[name]
        assert torch.equal(tensor[TARGET], was[SOURCE]), f"{mover}: {name} is not what was read"
        assert torch.equal(tensor[[0, 1, 3, 5]], was[[0, 1, 3, 5]]), f"{mover}: slots of {name} that were not named"


@pytest.mark.parametrize("mover", MOVERS)
def test_mover_every_model_type_every_declared_column_comes_back(mover: str) -> None:
    for model_type in TYPES:
        specs = specs_of(model_type)
        for types in TYPES_OF_CACHES.values():
            check_moved(mover, specs, types)


@pytest.mark.parametrize("mover", MOVERS)
def test_mover_of_all_columns_but_one_is_found(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, types = specs_of("qwen3_next"), TYPES_OF_CACHES["int8"]
    names = [name.split()[1] for name, _ in columns(random_cache(specs, types), types)]
    assert {name.partition(".")[2] for name in names} == {"k", "v", "k_scale", "v_scale", "conv", "ssm"}
    for left_out in names:

        def entries(table: Table, left_out: str = left_out) -> Iterable[tuple[str, Tensor]]:
            return [(name, tensor) for name, tensor in table._tensors.items() if name != left_out]

        monkeypatch.setattr(Table, "entries", property(entries))
        with pytest.raises(AssertionError, match=f"{left_out} is not what was read"):
            check_moved(mover, specs, types)


SPARSE = CacheTypes(sparse_kv_on_host=True)


def host_columns(specs: tuple[CacheSpec, ...]) -> list[str]:
    return [
        f"{layer}.{column.name}"
        for layer, spec in enumerate(specs)
        for column in spec.columns(SPARSE)
        if column.tier is Tier.HOST
    ]


def check_loaded(specs: tuple[CacheSpec, ...], *, left_out: str = "") -> None:
    """Load pages of the host tier to the device, with HiSparse."""
    cache = random_cache(specs, SPARSE)
    tiers = cache.tiers
    assert tiers is not None
    columns = dict(tiers._columns)
    tiers._columns.pop(left_out, None)
    tiers.load(torch.tensor(SOURCE), torch.tensor(TARGET))
    for name in host_columns(specs):
        resident = columns[name][: tiers.layout.hot_base]
        pages = resident.view(-1, PAGE_SIZE, *resident.shape[1:])
        same = torch.equal(pages[TARGET].view(torch.uint8), cache.tables["kv"][name][SOURCE].view(torch.uint8))
        assert same, f"hisparse: {name} is not what was read"


def test_hisparse_every_model_type_loads_every_column_of_the_host_tier() -> None:
    sparse = [model_type for model_type in TYPES if host_columns(specs_of(model_type))]
    assert {"glm_moe_dsa", "deepseek_v32"} <= set(sparse)
    for model_type in sparse:
        check_loaded(specs_of(model_type))


def test_hisparse_of_all_columns_but_one_is_found() -> None:
    specs = specs_of("glm_moe_dsa")
    for name in host_columns(specs):
        with pytest.raises(AssertionError, match=f"{name} is not what was read"):
            check_loaded(specs, left_out=name)


def test_layout_differs_where_a_row_means_something_else() -> None:
    def layout(model_type: str, types: CacheTypes, page_size: int = PAGE_SIZE) -> str:
        cache = CachePool(specs_of(model_type), types, page_size=page_size, num_slots={"kv": 1}, device="cpu")
        return Mover(cache).layout

    asked = [("llama", types) for types in TYPES_OF_CACHES.values()] + [("falcon_h1", CacheTypes())]
    layouts = [*(layout(*each) for each in asked), layout("llama", CacheTypes(), page_size=8)]
    assert len(set(layouts)) == len(layouts)
    assert layout("llama", CacheTypes()) == layouts[0]
