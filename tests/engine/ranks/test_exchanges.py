"""The exchange of an engine's ranks by its configuration: which file they share, and what each maps of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from forebay.base.errors import ConfigError
from forebay.config.engine_config import EngineConfig, RankExchange, RankOptions
from forebay.config.resolve import resolve
from forebay.engine.lifecycle.exchanges import make_exchange, make_exchange_file
from forebay.ops import Ops
from forebay.ops.exchange import Exchange
from tests.kernels import EMULATED, VARIANTS, native_ops
from tests.ops.exchanging import on_each
from tests.pools.file_driver import FileDriver, install

SIZE = 2


@pytest.fixture
def files() -> Iterator[list[int]]:
    made: list[int] = []
    yield made
    for file in made:
        os.close(file)


def config_of(exchange: RankExchange, device: str = "cpu") -> EngineConfig:
    ranks = RankOptions(size=SIZE, exchange=exchange)
    return replace(resolve({"dtype": "float32"}).engine, ranks=ranks, device=device)


@pytest.mark.skipif(not VARIANTS or bool(EMULATED), reason="no native kernels for this CPU")
@pytest.mark.parametrize(("name", "in_graphs"), [(RankExchange.SHM, True), (RankExchange.GLOO, False)])
def test_exchange_of_a_configuration_gives_each_rank_the_parts_of_all(
    name: RankExchange, in_graphs: bool, files: list[int]
) -> None:
    config, ops = config_of(name), native_ops(VARIANTS[0], 1)
    files.append(make_exchange_file(config, ops))
    with ThreadPoolExecutor(SIZE) as ranks:
        exchanges = list(ranks.map(lambda rank: make_exchange(config, ops, rank, files[0], ()), range(SIZE)))

    def gathered(exchange: Exchange) -> list[float]:
        return [float(value) for value in exchange.gather(torch.full((1, 1), float(exchange.rank)))[0]]

    assert on_each(exchanges, gathered) == [[0.0, 1.0]] * SIZE
    assert [exchange.in_graphs for exchange in exchanges] == [in_graphs] * SIZE


def test_exchange_through_a_gpu_s_memory_maps_the_same_zeros_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, files: list[int]
) -> None:
    of_gpu = pytest.importorskip("forebay.ops.triton.exchange", reason="Triton is not installed")
    install(monkeypatch, driver := FileDriver())
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("zeros are written"))
    config = config_of(RankExchange.IPC, "cuda")
    files.append(make_exchange_file(config, Ops(1)))
    assert events == ["zeros are written"]
    taken = len(driver.mapped)
    memories = [of_gpu.MemoryTransport(memory, rank, SIZE) for rank, memory in enumerate(_mapped(config, files[0]))]
    assert len(driver.mapped) == taken + SIZE
    memories[0]._counts[-1], memories[1]._buffers[-1] = 7, 9
    assert (int(memories[1]._counts[-1]), int(memories[0]._buffers[-1])) == (7, 9)
    assert not memories[1]._counts[:-1].any()


def _mapped(config: EngineConfig, file: int) -> list[torch.Tensor]:
    from forebay.engine.lifecycle import exchanges

    return [exchanges._memory_of(config, file, torch.device("cuda")) for _ in range(SIZE)]


@pytest.mark.parametrize("name", ["create", "export", "map", "access"])
def test_exchange_through_a_gpu_s_memory_that_the_driver_refuses_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    install(monkeypatch, FileDriver(name))
    with pytest.raises(
        ConfigError, match=r"--tp-exchange ipc: .* of 2 ranks: use --tp-exchange nccl .* or --tp-size 1"
    ):
        make_exchange_file(config_of(RankExchange.IPC, "cuda"), Ops(1))


def test_exchange_through_a_file_that_a_rank_s_gpu_cannot_map_is_refused(
    monkeypatch: pytest.MonkeyPatch, files: list[int]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    install(monkeypatch, FileDriver())
    files.append(os.memfd_create("of another GPU"))
    with pytest.raises(ConfigError, match="--tp-exchange ipc: the NVIDIA driver shares no memory"):
        make_exchange(config_of(RankExchange.IPC, "cuda"), Ops(1), 1, files[0], ())
