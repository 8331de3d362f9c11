"""The memory that a plan counts on is enough: processes, weights, steps and caches, full to the last page."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.base.units import parse_bytes
from forebay.cli.main import main
from forebay.config.estimates import RESERVE_BYTES
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from tests.integration.memory_group import memory_group
from tests.integration.tree import serving

PLANNED = parse_bytes("1280MiB")
# 128 KiB of KV per token and little to compute: the caches are full after 3,500 tokens.
SHAPE = ("num_attention_heads=32", "num_key_value_heads=32", "head_dim=128", "intermediate_size=256")
FLAGS: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "context_length": 2048}
PAGE_TOKENS, PROMPT_TOKENS = 16, 200
PAGE_BYTES = PAGE_TOKENS * 8 * 2 * 32 * 128 * 2


@pytest.fixture
def model(tmp_path: Path, embedded_model: Path) -> Path:
    path = tmp_path / "model"
    words = ["models", "make", "--like", "llama", "--out", str(path), "--hidden-size", "128", "--num-layers", "8"]
    assert main([*words, *(word for field in SHAPE for word in ("--set", field))]) == 0
    return path


@pytest.mark.slow
def test_engine_in_a_group_of_the_planned_size_fills_its_caches_without_an_oom_kill(
    model: Path, tmp_path: Path
) -> None:
    """The plan's memory without its reserve, which is for other programs."""
    survey = Survey(memory=lambda: Amount(PLANNED + RESERVE_BYTES, "of a test"))
    planned = resolve({"model": str(model), **FLAGS}, survey=survey).engine
    cache_bytes, host_bytes = planned.memory.kv_cache_bytes, planned.kinds.retraction_host_bytes
    words = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    words += [f"--{name}-timeout=3600" for name in ("queue", "request", "stall")]
    words += [f"--kv-cache-bytes={cache_bytes}", f"--retraction-host-bytes={host_bytes}"]
    with memory_group(PLANNED) as group, serving(tmp_path, model, *words, before=group.joining) as tree:
        tree.wait_ready()
        before, num_pages = group.anonymous_bytes, tree.pool("kv")["total"]
        assert before < PLANNED - cache_bytes  # no page of the caches is touched before its use
        num_prompts = num_pages * PAGE_TOKENS // PROMPT_TOKENS + 8
        with ThreadPoolExecutor(num_prompts) as threads:
            answers = list(threads.map(lambda seed: _answer(tree, seed), range(num_prompts)))
        assert answers == [200] * num_prompts
        assert tree.pool("kv")["free"] < PROMPT_TOKENS // PAGE_TOKENS
        assert group.anonymous_bytes - before > 0.99 * num_pages * PAGE_BYTES
        assert group.num_oom_kills == 0


def _answer(tree: Any, seed: int) -> int:
    """No two prompts begin alike."""
    numbers = random.Random(seed)
    prompt = [numbers.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    with tree.client() as client:
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
        status: int = client.post("/v1/completions", json=body).status_code
    return status
