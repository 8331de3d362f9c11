"""What changes with `--device cuda`: memory, kernels and defaults are the GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import ConfigError
from forebay.config.engine_config import ActivationDtype, Exact
from forebay.config.gpu import GpuLimits, GpuMemory, limits_for
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from forebay.pools.cache_spec import FullAttention, cache_sizes

GB = 1 << 30
H100 = Survey(memory=lambda: Amount(64 * GB, "available"), gpu=lambda: GpuMemory(total=80 * GB, free=79 * GB))


@pytest.fixture(autouse=True)
def _with_model(embedded_model: Path) -> None:
    """The rules look at a checkpoint."""


def test_a_gpu_brings_its_own_defaults() -> None:
    engine = resolve({"device": "cuda"}, survey=H100).engine
    assert (engine.device, engine.kernels, engine.types.dtype) == ("cuda", "triton", "bfloat16")
    assert (
        engine.memory.max_running_requests,
        engine.scheduling.chunked_prefill_size,
        engine.scheduling.overlap_depth,
    ) == (256, 8192, 1)
    assert 0.8 * 79 * GB < engine.memory.kv_cache_bytes < 0.88 * 79 * GB


def test_engines_of_one_gpu_have_weights_of_their_own_and_divide_the_rest() -> None:
    one, two, three = (
        resolve({"device": "cuda"} | ({"pd": pd} if pd else {}), survey=H100).engine.memory.kv_cache_bytes
        for pd in ("", "local", "local:2p1d")
    )
    assert one - two == two - three > 0


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_kv_in_eight_bits_on_a_gpu_takes_half_of_bfloat16_and_its_scales(name: str) -> None:
    engine = resolve({"device": "cuda", "kv_cache_dtype": name}, survey=H100).engine
    spec = FullAttention(num_kv_heads=8, head_dim=128)
    assert cache_sizes([spec], engine.types).kv_bytes_per_token == 2 * 8 * (128 + 4)


def test_kv_in_bfloat16_beside_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype \(bfloat16\).*needs --dtype bfloat16: use float32, int8"):
        resolve({"device": "cuda", "dtype": "float32", "kv_cache_dtype": "bfloat16"}, survey=H100)


def test_exact_is_on_by_default_and_off_on_a_gpu_alone() -> None:
    assert resolve({"device": "cuda"}, survey=H100).engine.exact is Exact.ON
    assert resolve({"device": "cuda", "exact": "off"}, survey=H100).engine.exact is Exact.OFF
    with pytest.raises(ConfigError, match=r"--exact \(off\): a CPU's kernels have equal bits at no cost: leave it out"):
        resolve({"exact": "off"}, survey=H100)


def test_inputs_in_fp8_are_for_a_gpu_alone() -> None:
    assert resolve({"device": "cuda"}, survey=H100).engine.activation_dtype is ActivationDtype.MODEL
    flags = {"device": "cuda", "activation_dtype": "fp8"}
    assert resolve(flags, survey=H100).engine.activation_dtype is ActivationDtype.FP8
    with pytest.raises(ConfigError, match=r"--activation-dtype \(fp8\): a CPU multiplies no FP8: leave it out"):
        resolve({"activation_dtype": "fp8"}, survey=H100)


def test_more_requests_than_a_gpu_has_by_default_are_not_all_captured() -> None:
    engine = resolve({"device": "cuda", "max_running_requests": "1000"}, survey=H100).engine
    assert (engine.memory.max_running_requests, engine.cuda_graph_max_bs) == (1000, 256)


def test_what_retracted_requests_keep_is_in_the_host_s_memory() -> None:
    small_host = Survey(memory=lambda: Amount(2 * GB, "available"), gpu=H100.gpu)
    assert resolve({"device": "cuda"}, survey=small_host).engine.kinds.retraction_host_bytes == GB // 2


def test_host_tier_is_a_quarter_of_free_host_memory_on_a_gpu_and_none_on_a_cpu() -> None:
    engine = resolve({"device": "cuda", "retraction_host_bytes": 4 * GB}, survey=H100).engine
    assert (engine.tiers.host_cache_bytes, engine.tiers.cache_check_rate) == (15 * GB, 1.0)
    engine = resolve({}, survey=H100).engine
    assert (engine.tiers.host_cache_bytes, engine.tiers.cache_check_rate) == (0, 1.0)
    assert resolve({"disable_radix_cache": True}, survey=H100).engine.tiers.cache_check_rate == 0.0


def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device.*no GPU.*use cpu"):
        resolve({"device": "cuda"}, survey=Survey(gpu=lambda: None))


@pytest.mark.parametrize(
    ("free_mib", "flags", "expected"),
    [
        (50, {}, r"50\.0 MiB of memory \(free on the GPU\) do not hold .* of weights: .*take a smaller model"),
        (
            3072,
            {"kv_cache_bytes": "4GiB"},
            r"--kv-cache-bytes \(4\.0 GiB\).*3\.0 GiB free on the GPU: give at most 2\.9",
        ),
    ],
)
def test_too_little_memory_of_a_gpu_is_refused_in_one_line_before_weights_are_read(
    free_mib: int, flags: dict[str, str], expected: str
) -> None:
    """However much the host has: weights and caches are on the GPU."""
    survey = Survey(memory=lambda: Amount(64 * GB, "available"), gpu=lambda: GpuMemory(4 * GB, free_mib << 20))
    with pytest.raises(ConfigError, match=expected) as raised:
        resolve({"device": "cuda", **flags}, survey=survey)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(("device", "kernels"), [("cuda", "native"), ("cuda", "torch"), ("cpu", "triton")])
def test_kernels_of_another_device_are_refused(device: str, kernels: str) -> None:
    with pytest.raises(ConfigError, match="these kernels are for c"):
        resolve({"device": device, "kernels": kernels}, survey=H100)


@pytest.mark.parametrize(
    ("gb", "limits"),
    [
        (8, GpuLimits(8, 2048)),
        (19.9, GpuLimits(8, 2048)),
        (24, GpuLimits(32, 4096)),
        (80, GpuLimits(256, 8192)),
        (141, GpuLimits(256, 8192)),
        (192, GpuLimits(512, 16384)),
    ],
)
def test_larger_gpus_run_more_requests_and_longer_chunks(gb: float, limits: GpuLimits) -> None:
    assert limits_for(int(gb * GB)) == limits
