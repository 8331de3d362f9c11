"""The size of caches that nobody wrote, by subtraction, and the refusal of weights that the memory does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import ConfigError, NotEnoughMemory
from forebay.base.units import human_bytes
from forebay.config import estimates
from forebay.config.config import Config
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from forebay.families.config.model_config import ModelConfig, config_from_folder
from forebay.formats.weight_shapes import WeightKind, WeightShapes
from tests.models.tiny import make_tiny

GIB = 1 << 30
PLAIN = {"quantization": "none", "dtype": "bfloat16"}
VISION = {"max_patches": 1, "intermediate_size": 1, "hidden_size": 1, "heads_width": 1}


def decided(memory: int, **flags: Any) -> Config:
    return resolve(flags, survey=Survey(memory=lambda: Amount(memory, "of a test")))


def cache_bytes(memory: int, **flags: Any) -> int:
    return decided(memory, **flags).engine.memory.kv_cache_bytes


def reason(config: Config, name: str) -> str:
    return next(item.reason for item in config.settings if item.name == name)


@pytest.mark.parametrize("gib", [3, 12, 13, 100])
def test_kv_cache_bytes_default_is_what_each_part_leaves(gib: int) -> None:
    """Embedded model: its embedding is not in codes here, so the head is packed from it a second time."""
    config = decided(gib * GIB, **PLAIN)
    weights = 269_030_016 + 2 * 49152 * 576
    processes = (448 << 20) + 49152 * 1280
    activations = 4 * ((512 + 64) * 1536 * 10 + 64 * 49152 * 2 + 8192 * 64 * 2)
    room = gib * GIB - max(GIB, int(gib * GIB * 0.08)) - weights - processes - activations
    assert config.engine.kinds.retraction_host_bytes == min(room // 16, GIB)
    assert config.engine.memory.kv_cache_bytes == room - min(room // 16, GIB)
    assert not config.engine.memory.spare_cache


def test_kv_cache_bytes_default_has_no_cap_and_no_share_of_the_weights() -> None:
    assert cache_bytes(100 * GIB) > 88 * GIB
    assert cache_bytes(100 * GIB, **PLAIN) > 88 * GIB


def test_kv_cache_bytes_default_reason_names_every_part() -> None:
    why = reason(decided(16 * GIB), "kv_cache_bytes")
    assert why.startswith("16.0 GiB of a test, less 1.3 GiB reserve, 92.1 MiB weights, ")
    assert [word for word in ("processes", "activations", "host copies") if word not in why] == []


def test_kv_cache_bytes_default_of_too_little_memory_is_the_least() -> None:
    config = decided(GIB)
    assert config.engine.memory.kv_cache_bytes == 16 << 20
    assert reason(config, "kv_cache_bytes").startswith("the least: 1.0 GiB of a test, less 1.0 GiB reserve")


def test_retraction_host_bytes_written_is_subtracted_as_it_is() -> None:
    assert (
        cache_bytes(64 * GIB, retraction_host_bytes=0) - cache_bytes(64 * GIB, retraction_host_bytes="3GiB") == 3 * GIB
    )


def test_mem_fraction_static_is_the_share_of_weights_and_caches_together() -> None:
    """SGLang's meaning; nothing else is subtracted."""
    config = decided(8 * GIB, **PLAIN, mem_fraction_static="50%")
    assert config.engine.memory.kv_cache_bytes == 4 * GIB - 269_030_016
    assert config.engine.memory.spare_cache
    assert config.engine.kinds.retraction_host_bytes == GIB
    assert cache_bytes(500 << 20, **PLAIN, mem_fraction_static="25%") == 16 << 20  # the weights alone take more


def test_several_engines_of_one_machine_each_have_weights_and_processes() -> None:
    one, two = cache_bytes(64 * GIB), cache_bytes(64 * GIB, pd="local:1p1d")
    assert one - two > 92 * 2**20 + estimates.PROCESS_BYTES


def test_activation_bytes_of_experts_are_those_that_a_token_meets(tmp_path: Path) -> None:
    make_tiny("qwen3_moe", tmp_path)
    model: ModelConfig = config_from_folder(tmp_path)
    assert model.experts is not None
    step = estimates.StepShape(chunk_tokens=100, num_rows=10, width=20, context_length=0)
    weights = WeightShapes({WeightKind(None, 8, 4): 64})
    widest = max(8, model.experts.per_token * model.experts.intermediate_size)
    expected = 4 * (200 * widest * estimates.ACTIVATION_WIDTHS + 10 * model.vocab_size * estimates.LOGITS_COPIES)
    assert estimates.activation_bytes(model, weights, step) == expected


def test_kv_cache_bytes_default_leaves_room_for_an_image_that_no_chunk_may_cut(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    text, weights = config_from_folder(tmp_path), WeightShapes({WeightKind(None, 8, 4): 64})

    def left(longest_span: int) -> int:
        vision: Any = SimpleNamespace(**VISION, longest_span=longest_span)
        model = replace(text, vision=vision)
        survey = Survey(memory=lambda: Amount(16 * GIB, "of a test"), model=lambda *which: (model, weights))
        steps = {"chunked_prefill_size": 64, "speculative_algorithm": "off"}
        flags = {**PLAIN, **steps, "model": str(tmp_path), "retraction_host_bytes": 0}
        return resolve(flags, survey=survey).engine.memory.kv_cache_bytes

    assert left(0) == left(64)
    assert left(64) - left(280) == 4 * (280 - 64) * 8 * estimates.ACTIVATION_WIDTHS


def test_weights_that_do_not_fit_name_the_quantizations_that_leave_memory_for_caches(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = config_from_folder(tmp_path)

    def refused(num_weights: int, memory: int) -> str:
        shapes = WeightShapes({WeightKind(None, 4096, 4): num_weights})
        survey = Survey(memory=lambda: Amount(memory, "of a test"), model=lambda *which: (config, shapes))
        with pytest.raises(NotEnoughMemory, match=r"do not hold") as caught:
            resolve({"model": str(tmp_path), **PLAIN}, survey=survey)
        return str(caught.value)

    both = refused(8 << 30, 12 * GIB)
    assert both.endswith("--quantization int8 needs 8.5 GiB, --quantization int4 needs 5.0 GiB")
    assert "int8" not in refused(8 << 30, 9 * GIB)
    assert f"the smallest needs {human_bytes(5 * GIB)}: take a smaller model" in refused(8 << 30, 5 * GIB)


def test_written_sizes_that_do_not_fit_beside_the_weights_name_the_most() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-bytes \(60\.0 GiB\) and .* give at most"):
        decided(16 * GIB, kv_cache_bytes="60GiB")


def test_a_number_of_requests_that_somebody_wrote_comes_first() -> None:
    assert not decided(16 * GIB).engine.memory.requests_first
    assert not decided(16 * GIB, max_running_requests="auto").engine.memory.requests_first
    assert decided(16 * GIB, max_running_requests=64).engine.memory.requests_first
