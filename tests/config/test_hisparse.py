"""Settings of HiSparse: what they become, and one line for each that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve
from tests.config.test_gpu import H100
from tests.models.tiny import shared_tiny

TOP_K = 6  # of the small model


@pytest.fixture(scope="module")
def sparse() -> Path:
    return shared_tiny("deepseek_v32").path


def options(path: Path, **flags: Any) -> Any:
    return resolve({"model": str(path), "enable_hisparse": True, **flags}).engine


def test_hisparse_is_off_by_default(sparse: Path) -> None:
    engine = resolve({"model": str(sparse)}).engine
    assert not engine.hisparse.enabled
    assert not engine.types.sparse_kv_on_host


def test_hisparse_sizes_follow_the_model(sparse: Path) -> None:
    engine = options(sparse)
    found = engine.hisparse
    assert engine.types.sparse_kv_on_host
    assert (found.top_k, found.device_buffer_size, found.host_to_device_ratio) == (TOP_K, 2 * TOP_K, 2.0)


def test_hisparse_config_is_read(sparse: Path, tmp_path: Path) -> None:
    config = '{"top_k": 6, "device_buffer_size": 50, "host_to_device_ratio": 3.5}'
    found = options(sparse, hisparse_config=config, hisparse_host_path=str(tmp_path)).hisparse
    assert (found.device_buffer_size, found.host_to_device_ratio, found.host_path) == (50, 3.5, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('{"top_k": 7}', "top_k is 7, a query of this model reads 6"),
        ('{"device_buffer_size": 5}', "a hot buffer of 5 tokens is too small, a query reads 6"),
        ('{"device_buffer_size": 12.0}', "device_buffer_size is 12.0, not a whole number"),
        ('{"device_buffer_size": true}', "device_buffer_size is true, not a whole number"),
        ('{"device_buffer_size": 99999999}', "not a whole number of tokens from 1 to 1048576"),
        ('{"host_to_device_ratio": 0.99}', "host_to_device_ratio is 0.99, not a number from 1"),
        ('{"host_to_device_ratio": NaN}', "host_to_device_ratio is NaN"),
        ('{"buffer": 50}', "'buffer' is not one of top_k, device_buffer_size, host_to_device_ratio"),
        ('{"top_k": 6, "top_k": 6}', "'top_k' is there 2 times"),
        ("[6]", "not a JSON object"),
        ("top_k=6", "not JSON"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_hisparse_config_that_cannot_work_is_refused_with_one_line(sparse: Path, config: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options(sparse, hisparse_config=config)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "--hisparse-config" in str(refused.value) or "hisparse_config" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"enable_hisparse": False, "hisparse_config": "{}"}, "without --enable-hisparse it has no effect"),
        ({"enable_hisparse": False, "hisparse_host_path": "/tmp"}, "without --enable-hisparse it has no effect"),
        ({"page_size": 1}, "the newest tokens have a page in a hot buffer, and a step verifies 8"),
        (
            {"hisparse_host_path": "/tmp", "disaggregation_mode": "decode", "insecure_no_cluster_key": True},
            "peers map KV as shared memory, which a file is not",
        ),
    ],
)
def test_hisparse_flags_that_clash_are_refused(sparse: Path, flags: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options(sparse, **flags)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, None),
        ({"hisparse_host_path": "/tmp"}, "on a GPU the host tier is pinned memory, which a file is not"),
        ({"enable_memory_saver": True}, "releases no memory that the driver has mapped for two tiers: leave one out"),
    ],
)
def test_hisparse_on_a_gpu_has_a_host_tier_in_memory_that_stays(
    sparse: Path, flags: dict[str, Any], why: str | None
) -> None:
    given = {"model": str(sparse), "enable_hisparse": True, "device": "cuda", **flags}
    if why is None:
        assert resolve(given, survey=H100).engine.hisparse.enabled
        return
    with pytest.raises(ConfigError, match=why):
        resolve(given, survey=H100)


def test_hisparse_of_a_model_without_sparse_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama has no layer with sparse attention"):
        options(shared_tiny("llama").path)
