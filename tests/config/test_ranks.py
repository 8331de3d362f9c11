"""Tensor parallelism: what is configured, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve


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
    ],
)
def test_ranks_with_what_is_not_built_for_them_are_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve({"tp_size": 3, **flags})
