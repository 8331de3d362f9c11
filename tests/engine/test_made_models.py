"""A small random model of every type answers end to end, and the same when its prompt comes from the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cli.main import main
from forebay.engine.client.llm import LLM
from forebay.families import TYPES
from forebay.requests.sampling_params import SamplingParams
from tests.kernels import NATIVE

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
CHAT = [{"role": "user", "content": "Say what a forebay is, in a few words, and name one that you know."}]


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_made_model_answers_twice_alike(model_type: str, tmp_path: Path, embedded_model: Path) -> None:
    path = tmp_path / model_type
    assert main(["models", "make", "--like", model_type, "--out", str(path), "--hidden-size", "32"]) == 0
    llm = LLM(
        str(path), page_size=16, chunked_prefill_size=16, kv_cache_bytes="16MiB", context_length=256,
        max_running_requests=2, num_threads=1, dtype="float32", kernels=NATIVE, log_level="warning",
    )  # fmt: skip
    (first,), (second,) = (llm.chat(CHAT, GREEDY) for _ in range(2))
    assert first.error is None
    assert len(first.token_ids) == GREEDY.max_tokens
    assert second.token_ids == first.token_ids
    assert second.cache.cached_tokens > 0
