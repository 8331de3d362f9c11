"""What an engine says about itself when it is up."""

from __future__ import annotations

import json
import logging
import mmap
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.backends import make_ops
from forebay.base.errors import ConfigError, NotEnoughMemory
from forebay.config.machine import available_memory
from forebay.config.resolve import resolve
from forebay.engine.loop import build
from forebay.engine.loop.build import build_engine, check_fp8
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import FP8
from forebay.formats.weight_shapes import WeightKind, WeightShapes
from forebay.ops import Ops
from tests.models.tiny import make_tiny, shared_tiny

KINDS = {
    "falcon_h1": ["kv cache", "state cache"],
    "mamba2": ["state cache"],
    "lfm3": ["kv cache", "window cache", "state cache"],
    "deepseek_v3": ["kv cache"],
}


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_of_cache_is_as_large_as_was_planned_before_the_weights_were_loaded(case: str):
    """C4: two countings of the same bytes, by what the specs say and by what the tensors take."""
    settings = {
        "model": str(shared_tiny(case).path),
        "dtype": "bfloat16",
        "context_length": 64,
        "kv_cache_bytes": "8MiB",
    }
    _, ready = build_engine(resolve(settings).engine)
    allocated = {item: (value, reason) for _, item, value, reason in ready.report if item.endswith(" allocated")}
    assert list(allocated) == [f"{kind} allocated" for kind in KINDS[case]]
    assert all(reason == f"{value} planned" for value, reason in allocated.values())


def test_engine_in_a_memory_group_has_caches_within_the_limit_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends an engine that was planned for the memory of the machine around its group."""
    limit, machine = 64 << 20, 256 << 20
    group, proc = tmp_path / "cgroup" / "job", tmp_path / "proc"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("0\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "meminfo").write_text(f"MemTotal: {machine >> 10} kB\nMemAvailable: {machine >> 10} kB\n")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(available_memory, "__defaults__", (group.parent, proc, lambda which: unlimited))
    settings = {"model": str(shared_tiny("llama").path), "dtype": "float32", "context_length": 64, "num_threads": 1}
    core, _ = build_engine(resolve({**settings, "mem_fraction_static": "50%"}).engine)
    config = core.scheduler.config
    assert limit // 4 < config.num_pages * config.kinds.slot_bytes["kv"] < limit // 2


def test_options_that_nobody_knows_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_tiny("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "warp_factor": 9, "use_alibi": True, "z": None}))
    settings = {"model": str(tmp_path), "dtype": "float32", "context_length": 64, "kv_cache_bytes": "8MiB"}
    with caplog.at_level(logging.WARNING, logger="forebay"):
        build_engine(resolve(settings).engine)
    (line,) = [record.message for record in caplog.records if "unknown_model_options" in record.message]
    assert 'names="use_alibi, warp_factor"' in line


def test_c31_kernels_compare_products_up_to_the_tokens_of_a_step_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def make(*_: object, **options: Any) -> Ops:
        asked.append(options)
        return make_ops("torch", 1)

    monkeypatch.setattr(build, "make_ops", make)
    settings = {"model": str(shared_tiny("llama").path), "dtype": "float32", "context_length": 64}
    build_engine(resolve({**settings, "kv_cache_bytes": "8MiB", "chunked_prefill_size": 48}).engine)
    assert [options["most_rows"] for options in asked] == [48]


def test_inputs_in_fp8_need_weights_that_are_held_in_fp8_by_groups_of_128() -> None:
    by_row, by_32 = (WeightShapes({WeightKind(replace(FP8, group=group), 4096, 4): 9}) for group in (4096, 32))
    check_fp8(Quantization.FILE, by_row)
    for quantization, weights in (
        (Quantization.NONE, by_row),
        (Quantization.INT4, by_row),
        (Quantization.FILE, by_32),
        (Quantization.FILE, WeightShapes({WeightKind(None, 4096, 4): 9})),
    ):
        with pytest.raises(ConfigError, match=r"--activation-dtype fp8: .* no weights are held in FP8 .*leave it out"):
            check_fp8(quantization, weights)


def out_of_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def out_of_numpy() -> None:
    np.zeros(1 << 50, dtype=np.uint8)


def out_of_the_system() -> None:
    mmap.mmap(-1, 1 << 60)


def test_start_up_without_memory_of_a_gpu_names_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 80 << 30))
    config = resolve({"model": str(shared_tiny("llama").path), "dtype": "float32", "kv_cache_bytes": "8MiB"}).engine
    what = r"8(\.0)? MiB for its caches do not fit in memory; 3\.0 GiB are free on the GPU: lower --mem-fraction-static"
    with pytest.raises(ConfigError, match=what) as raised, build._within_memory(replace(config, device="cuda")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "\n" not in raised.value.message


def test_caches_that_hold_no_request_are_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(build, "EngineWeights", read)
    settings = {
        "model": str(shared_tiny("llama").path),
        "dtype": "float32",
        "kv_cache_bytes": "64KiB",
        "page_size": 1024,
    }
    with pytest.raises(NotEnoughMemory, match=r"the caches have 64\.0 KiB and one request needs at least .*: raise"):
        build_engine(resolve(settings).engine)


@pytest.mark.parametrize("take", [out_of_torch, out_of_numpy, out_of_the_system])
def test_start_up_without_memory_prints_one_line(take, monkeypatch: pytest.MonkeyPatch):
    """A limit on address space, or a machine that lends no more than it has."""
    monkeypatch.setattr("forebay.runtime.model_runner.ModelRunner.warm_up", lambda self: take())
    settings = {"model": str(shared_tiny("llama").path), "dtype": "float32", "context_length": 64}
    settings["kv_cache_bytes"] = "8MiB"
    with pytest.raises(ConfigError, match=r"8(\.0)? MiB for its caches do not fit .*--kv-cache-bytes"):
        build_engine(resolve(settings).engine)
