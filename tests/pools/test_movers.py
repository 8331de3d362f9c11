"""All that copies slots copies every column that the layers of a model declare, of every model type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.parts import I64
from forebay.config.engine_config import CacheTypes
from forebay.families import TYPES
from forebay.families.config.model_config import config_of
from forebay.families.small import small_config
from forebay.formats.prefix_files import Record, Rows
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.memory.kv_allocator import KV
from forebay.models import needs_of
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import CacheSpec, Tier
from forebay.pools.mover import Declared, Mover
from forebay.pools.tiers import HotSizes
from forebay.requests.pieces import KindShape, Piece, pieces
from forebay.requests.step_plan import TierCopy
from forebay.requests.transfers import Span
from forebay.runtime.host.disk_store import DiskStore
from forebay.runtime.host.host_copies import HostCopies
from forebay.runtime.host.tier_stores import HostStore, TierStore, TierStores
from forebay.transfer.wire.memory import HostMemory, chunk_bytes, shapes_of

PAGE_SIZE = 16  # the most tokens that a column has one entry for
NUM_SLOTS = {"kv": 5, "window": 5, "state": 5, "ring": 5, RESIDENT: 5}
SOURCE, TARGET, OTHERS = [3, 1], [2, 4], [0, 1, 3, 5]
TYPES_OF_CACHES = {
    "float32": CacheTypes(),
    "bfloat16": CacheTypes(dtype="bfloat16", kv_cache_dtype="bfloat16", mamba_ssm_dtype="float32"),
    "int8": CacheTypes(dtype="bfloat16", kv_cache_dtype="int8", mamba_ssm_dtype="bfloat16"),
    "sparse": CacheTypes(sparse_kv_on_host=True),
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
    for kind in cache.tables:
        cache.mover.copy(kind, torch.tensor(SOURCE), torch.tensor(TARGET))


def host_rows(cache: CachePool) -> None:
    """As a sleeping engine."""
    cache.mover.write(cache.mover.read(places(cache, SOURCE)), places(cache, TARGET))


def retraction(cache: CachePool) -> None:
    copies = HostCopies(cache.mover)
    copies.save(1, places(cache, SOURCE))
    copies.load(1, places(cache, TARGET))


def in_tier(cache: CachePool, store: TierStore) -> None:
    there = {kind: np.array(TARGET) for kind in cache.tables if cache.has(kind)}
    ends = {kind: Rows([1, 2], 0, []) for kind in there}
    record = msgspec.msgpack.encode(Record("", "", b"", 0, ends))
    copy = TierCopy(number=1, tier="tier", slots=there, there=there, record=record)
    stores = TierStores(cache.mover, {"tier": store})
    stores.store(copy, places(cache, SOURCE))
    stores.fetch(copy, places(cache, TARGET))
    assert not stores.take_lost()


def host_tier(cache: CachePool) -> None:
    in_tier(cache, HostStore(cache.mover, {kind: 5 for kind in cache.tables if cache.has(kind)}))


def disk_tier(cache: CachePool) -> None:
    with TemporaryDirectory() as folder:
        store = DiskStore(cache.mover, Path(folder), {"weights": "a"}, limit_bytes=1 << 20)
        in_tier(cache, store)
        store.close()


def transfer(cache: CachePool) -> None:
    shapes = shapes_of(cache)
    memory = HostMemory.of(cache, shapes)
    staging = memory.staging(chunk_bytes(shapes))
    for piece, at in moved_pieces(shapes):
        memory.scatter(piece._replace(places=at), memory.gather(piece, staging))


def transfer_of_a_gpu(cache: CachePool) -> None:
    """By tensors, as a GPU's memory is read and written; without its streams."""
    shapes = shapes_of(cache)
    for piece, at in moved_pieces(shapes):
        columns = cache.mover.by_place(piece.kind, shapes[piece.kind].bytes_per_place)
        for column in columns[piece.region : piece.region + piece.num_regions]:
            column[torch.from_numpy(at)] = column[torch.from_numpy(piece.places)]


def moved_pieces(shapes: Mapping[str, KindShape]) -> Iterator[tuple[Piece, I64]]:
    for kind, shape in shapes.items():
        here, there = (Span(start=0, ids=np.array(slots)) for slots in (SOURCE, TARGET))
        length = len(SOURCE) * PAGE_SIZE if shape.by_token else len(SOURCE)
        for piece in pieces(kind, shape, here, 0, length):
            yield piece, shape.places(there, piece.first, piece.end)


def hisparse(cache: CachePool) -> None:
    """Pages of the host tier become resident; where there is no such tier, nothing is to be done."""
    cache.mover.load(torch.tensor(SOURCE), torch.tensor(TARGET))


MOVERS: dict[str, Callable[[CachePool], None]] = {
    "copy_on_write": copy_on_write,
    "host_rows": host_rows,
    "retraction": retraction,
    "host_tier": host_tier,
    "disk_tier": disk_tier,
    "transfer": transfer,
    "transfer_of_a_gpu": transfer_of_a_gpu,
    "hisparse": hisparse,
}


def random_cache(specs: tuple[CacheSpec, ...], types: CacheTypes) -> CachePool:
    cache = CachePool(
        specs, types, page_size=PAGE_SIZE, num_slots=NUM_SLOTS, device="cpu", hot=HotSizes(num_rows=2, num_columns=4)
    )
    for _, tensor in columns(cache, types):
        tensor.random_(generator=torch.Generator().manual_seed(1))
    return cache


def written(cache: CachePool, mover: str) -> dict[str, Tensor]:
    """Where the mover writes, by column: the caches themselves, or the resident pages of those in the host tier."""
    if mover != "hisparse":
        return {}
    found = {} if cache.tiers is None else cache.tiers.resident
    return {f"{KV} {name}": tensor.reshape(len(tensor), -1).view(torch.uint8) for name, tensor in found.items()}


def check_moved(mover: str, specs: tuple[CacheSpec, ...], types: CacheTypes) -> None:
    cache = random_cache(specs, types)
    before = {name: tensor.clone() for name, tensor in columns(cache, types)}
    try:
        MOVERS[mover](cache)
    except ConfigError:  # entries of compressed KV in 8 bits that a transfer cannot divide into tokens
        assert mover.startswith("transfer")
        return
    for name, tensor in (written(cache, mover) if mover == "hisparse" else dict(columns(cache, types))).items():
        assert torch.equal(tensor[TARGET], before[name][SOURCE]), f"{mover}: {name} is not what was read"
        others = torch.zeros_like(tensor) if mover == "hisparse" else before[name]
        assert torch.equal(tensor[OTHERS], others[OTHERS]), f"{mover}: slots of {name} that were not named"


@pytest.mark.parametrize("mover", MOVERS)
def test_mover_every_model_type_every_declared_column_comes_back(mover: str) -> None:
    """Each with types of caches in turn, so that the movers of a model type have several."""
    names, first = [*TYPES_OF_CACHES], [*MOVERS].index(mover)
    for number, specs in enumerate(dict.fromkeys(map(specs_of, TYPES))):  # equal declarations once
        name = "sparse" if mover == "hisparse" else names[(first + number) % 3]
        check_moved(mover, specs, TYPES_OF_CACHES[name])


def is_sparse(specs: tuple[CacheSpec, ...]) -> bool:
    sparse = TYPES_OF_CACHES["sparse"]
    return any(column.tier is Tier.HOST for spec in specs for column in spec.columns(sparse))


def test_hisparse_moves_columns_of_some_model_types() -> None:
    assert {"glm_moe_dsa", "deepseek_v32"} <= {name for name in TYPES if is_sparse(specs_of(name))}


@pytest.mark.parametrize("mover", MOVERS)
def test_mover_of_all_columns_but_one_is_found(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, types = ("glm_moe_dsa", "sparse") if mover == "hisparse" else ("qwen3_next", "int8")
    specs = specs_of(model_type)
    cache = random_cache(specs, TYPES_OF_CACHES[types])
    moved = written(cache, mover) if mover == "hisparse" else dict(columns(cache, TYPES_OF_CACHES[types]))
    endings = {name.rpartition(".")[2] for name in moved}
    assert endings == ({"k"} if mover == "hisparse" else {"k", "v", "k_scale", "v_scale", "conv", "ssm"})
    make = Mover.__init__
    for left_out in (name.split()[1] for name in moved):

        def without(
            mover: Mover, declared: Declared, size: int, resident: Any, stream: Any, left_out: str = left_out
        ) -> None:
            some = {kind: {name: own[name] for name in own if name != left_out} for kind, own in declared.items()}
            make(mover, some, size, {name: resident[name] for name in resident if name != left_out}, stream)

        monkeypatch.setattr(Mover, "__init__", without)
        with pytest.raises(AssertionError, match=f"{left_out} is not what was read"):
            check_moved(mover, specs, TYPES_OF_CACHES[types])


def test_layout_differs_where_a_row_means_something_else() -> None:
    def layout(model_type: str, types: CacheTypes, page_size: int = PAGE_SIZE) -> str:
        cache = CachePool(specs_of(model_type), types, page_size=page_size, num_slots={"kv": 1}, device="cpu")
        return cache.mover.layout

    asked = [("llama", TYPES_OF_CACHES[name]) for name in ("float32", "bfloat16", "int8")] + [
        ("falcon_h1", CacheTypes())
    ]
    layouts = [*(layout(*each) for each in asked), layout("llama", CacheTypes(), page_size=8)]
    assert len(set(layouts)) == len(layouts)
    assert layout("llama", CacheTypes()) == layouts[0]


def test_mover_writes_nothing_of_a_kind_without_rows() -> None:
    """C19: a prefix is loaded from a tier that has its pages and no state."""
    cache = CachePool(specs_of("llama"), CacheTypes(), num_slots={KV: 5}, page_size=PAGE_SIZE, device="cpu")
    none = np.empty(0, dtype=np.int64)
    copy = TierCopy(number=1, tier="host", slots={KV: none}, there={KV: none})
    before = [column.clone() for _, column in columns(cache, CacheTypes())]
    cache.mover.write(HostStore(cache.mover, {KV: 5}).fetch(copy), {KV: torch.from_numpy(none.copy())})
    assert all(torch.equal(was, column) for was, (_, column) in zip(before, columns(cache, CacheTypes()), strict=True))
