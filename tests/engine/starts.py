"""Engines with small models in this process, and their greedy tokens; without transformers, for processes of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.requests.sampling_params import SamplingParams
from tests.kernels import NATIVE

PROMPTS = [[5, 9, 13, 17, 21, 25, 29], [3, 4], [90, 80, 70, 60, 50, 40, 30, 20, 10, 11, 12, 13, 14, 15, 16, 17]]
NEW_TOKENS = 12


def wanted(request_id: int, prompt: list[int]) -> AddRequest:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


def tokens_of(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {}
    for request_id, prompt in enumerate(prompts, start=1):
        assert core.add(wanted(request_id, prompt)) == []
        tokens[request_id] = []
    while not core.idle:
        for update in core.step():
            assert update.failure is None
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


def start(path: Path, **flags: Any) -> tuple[EngineCore, str]:
    """The engine, and what the start-up table has about the cache."""
    asked = {"model": str(path), "dtype": "float32", "chunked_prefill_size": 5, "page_size": 4, "context_length": 64}
    asked |= {"kv_cache_bytes": "4MiB", "max_running_requests": 8, "kernels": NATIVE, "quantization": "int4"}
    core, ready = build_engine(resolve({"weights_cache_bytes": "64MiB", **asked, **flags}).engine)
    (outcome,) = [f"{value}: {reason}" for _, item, value, reason in ready.report if item == "weights cache"]
    return core, outcome
