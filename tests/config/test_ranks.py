"""Tensor parallelism: what is configured, and what is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from forebay.base.errors import ConfigError
from forebay.config import ranks
from forebay.config.engine_config import EngineConfig, RankExchange, RankOptions
from forebay.config.flag import Settled, Value
from forebay.config.gpu import GpuMemory
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from forebay.engine.ranks.processes import own_variables

PLAIN: Final[dict[str, Value]] = {
    "tp_size": 2,
    "tp_exact": "on",
    "tp_exchange": "shm",
    "exact": "on",
    "device": "cpu",
    "kernels": "avx2",
    "disaggregation_mode": "null",
    "speculative_algorithm": "NGRAM",
    "enable_lora": False,
    "enable_hisparse": False,
}


def test_ranks_get_an_equal_part_of_the_cores() -> None:
    whole, parts = resolve({}).engine, resolve({"tp_size": 3}).engine
    assert (whole.ranks.size, parts.ranks.size) == (1, 3)
    assert parts.num_threads == max(1, whole.num_threads // 3)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kernels": "torch"}, "--kernels"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"prefix_cache_dir": "/nowhere"}, "--prefix-cache-dir"),
        ({"cache_check_rate": 1.0}, "--cache-check-rate"),
        ({"tp_exact": "off"}, "--tp-exact"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
    ],
)
def test_ranks_with_what_is_not_built_for_them_are_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve({"tp_size": 3, **flags})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("exact", "off"),
        ("speculative_algorithm", "NEXTN"),
        ("speculative_algorithm", "EAGLE3"),
        ("enable_hisparse", True),
    ],
)
def test_ranks_name_each_setting_that_is_not_built_for_them(setting: str, value: object) -> None:
    settled = Settled(PLAIN | {setting: value})
    facts: Any = SimpleNamespace(model=SimpleNamespace(vision=None), gpu=None)
    (line,) = ranks.problems(settled, lambda name: f"--{name}", facts)
    assert line.startswith(f"--tp_size and --{setting}: ")
    assert line.endswith("use --tp-size 1")


def on_gpus(count: int, **flags: Any) -> EngineConfig:
    memory = 80 << 30
    survey = Survey(memory=lambda: Amount(memory, "free"), gpu=lambda: GpuMemory(memory, memory, count))
    return resolve({"device": "cuda", **flags}, survey=survey).engine


def test_ranks_on_a_cpu_exchange_through_shared_memory_or_gloo() -> None:
    assert resolve({"tp_size": 2}).engine.ranks.exchange is RankExchange.SHM
    assert resolve({"tp_size": 2, "tp_exchange": "gloo"}).engine.ranks.exchange is RankExchange.GLOO
    interpreted = resolve({"tp_size": 2, "kernels": "triton-interpreter"}).engine.ranks
    assert (interpreted.exchange, interpreted.own_gpus) == (RankExchange.IPC, False)


@pytest.mark.parametrize(
    ("count", "size", "exchange", "own"),
    [(1, 2, RankExchange.IPC, False), (2, 2, RankExchange.NCCL, True), (8, 4, RankExchange.NCCL, True)],
)
def test_ranks_have_a_gpu_each_if_there_are_as_many_and_share_one_else(
    count: int, size: int, exchange: RankExchange, own: bool
) -> None:
    ranks_of_gpus = on_gpus(count, tp_size=size).ranks
    assert (ranks_of_gpus.exchange, ranks_of_gpus.own_gpus) == (exchange, own)


def test_ranks_with_a_gpu_each_have_the_memory_of_all_for_caches() -> None:
    one = on_gpus(2).memory.kv_cache_bytes
    shared, both = (on_gpus(count, tp_size=2).memory.kv_cache_bytes for count in (1, 2))
    assert shared == one
    assert both - shared == int(0.88 * (160 << 30)) - int(0.88 * (80 << 30))


@pytest.mark.parametrize(
    ("count", "flags", "line"),
    [
        (1, {"tp_size": 2, "tp_exchange": "nccl"}, r"NCCL needs a GPU for each of 2 ranks, and there is one: use ipc"),
        (2, {"tp_size": 3}, r"3 ranks on 2 GPUs: use --tp-size 2, or one GPU for all ranks by CUDA_VISIBLE_DEVICES"),
        (2, {"tp_size": 2, "tp_exchange": "shm"}, "triton kernels exchange through nccl or ipc"),
        (1, {"tp_size": 2, "exact": "off"}, "--exact .*ranks have the bits of one: use --tp-size 1"),
    ],
)
def test_ranks_that_gpus_cannot_have_are_refused_in_one_line(count: int, flags: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        on_gpus(count, **flags)


@pytest.mark.parametrize(
    ("kernels", "exchange", "line"),
    [
        (None, "nccl", "kernels exchange through shm or gloo: use one"),
        (None, "ipc", "kernels exchange through shm or gloo: use one"),
        ("triton-interpreter", "shm", "triton-interpreter kernels exchange through ipc or gloo: use one"),
    ],
)
def test_ranks_on_a_cpu_exchange_through_no_gpu(kernels: str | None, exchange: str, line: str) -> None:
    flags = {} if kernels is None else {"kernels": kernels}
    with pytest.raises(ConfigError, match=line):
        resolve({"tp_size": 2, "tp_exchange": exchange, **flags})


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("3, 5", ["3", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_rank_with_a_gpu_of_its_own_sees_that_one_alone(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    each = RankOptions(size=2, exchange=RankExchange.NCCL, own_gpus=True)
    assert [own_variables(each, rank) for rank in range(2)] == [{"CUDA_VISIBLE_DEVICES": name} for name in names]
    assert own_variables(RankOptions(size=2), 1) == {}
