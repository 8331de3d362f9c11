"""Tensor parallelism: what is configured, and what is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from forebay.base.errors import ConfigError
from forebay.config import ranks
from forebay.config.flag import Settled, Value
from forebay.config.resolve import resolve

PLAIN: Final[dict[str, Value]] = {
    "tp_size": 2,
    "tp_exact": "on",
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
        ("device", "cuda"),
        ("speculative_algorithm", "NEXTN"),
        ("speculative_algorithm", "EAGLE3"),
        ("enable_hisparse", True),
    ],
)
def test_ranks_name_each_setting_that_is_not_built_for_them(setting: str, value: object) -> None:
    settled = Settled(PLAIN | {setting: value})
    (line,) = ranks.problems(settled, lambda name: f"--{name}", SimpleNamespace(vision=None))  # type: ignore[arg-type]
    assert line.startswith(f"--tp_size and --{setting}: ")
    assert line.endswith("use --tp-size 1")
