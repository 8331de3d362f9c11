"""Conversations with models that keep states or windows, through the whole engine: resumed where they were left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.cli.main import main
from forebay.engine.client.llm import LLM, RequestOutput
from forebay.requests.sampling_params import SamplingParams
from tests.kernels import NATIVE

SYSTEM = {"role": "system", "content": "You are a careful gardener and answer in few words. " * 4}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["falcon_h1", "gemma3_text", "mamba2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    small = ["--hidden-size", "64", "--num-layers", "4", "--dtype", "float32"]
    assert main(["models", "make", "--like", request.param, "--out", str(folder), *small]) == 0
    return folder


def llm(model: Path, **flags: Any) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_bytes": "64MiB",
        "context_length": 1024,
        "kernels": NATIVE,
        **flags,
    }
    return LLM(str(model), num_threads=1, max_running_requests=2, log_level="warning", **options)


def ask(engine: LLM, *talk: dict[str, str]) -> RequestOutput:
    (output,) = engine.chat([SYSTEM, *talk], GREEDY)
    return output


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("strategy", "overlap_depth"),
    [
        ("extra_buffer", 1),
        ("no_buffer", 0),
        pytest.param("extra_buffer", 0, marks=pytest.mark.slow),
        pytest.param("no_buffer", 1, marks=pytest.mark.slow),
    ],
)
def test_another_conversation_goes_on_behind_the_system_prompt(model: Path, strategy: str, overlap_depth: int) -> None:
    """C18, C19: the first one left its state at the last whole page that both share, which a page size of 1 makes the
    very token before they differ. The tokens are those of a cold start."""
    engine = llm(model, mamba_scheduler_strategy=strategy, overlap_depth=overlap_depth)
    first = ask(engine, user("When do tulips want to be planted? " * 8))
    second = ask(engine, user("And roses? " * 12))
    shared = next(
        i for i, (a, b) in enumerate(zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)) if a != b
    )
    page = engine.info.page_size
    assert first.cache.cached_tokens == 0
    assert second.cache.cached_tokens == shared // page * page > 32
    assert second.cache.differs_at == shared
    cold = llm(model, disable_radix_cache=True)
    assert ask(cold, user("And roses? " * 12)).token_ids == second.token_ids


@pytest.mark.slow
@pytest.mark.quick(1)
def test_the_next_turn_goes_on_behind_the_last_prompt(model: Path) -> None:
    """C18, C19."""
    engine = llm(model)
    first = ask(engine, user("When do tulips want to be planted? " * 8))
    talk = (user("When do tulips want to be planted? " * 8), {"role": "assistant", "content": first.text})
    second = ask(engine, *talk, user("And roses?"))
    assert second.cache.cached_tokens >= len(first.prompt_token_ids) - 2 * engine.info.page_size
    cold = llm(model, disable_radix_cache=True)
    assert ask(cold, *talk, user("And roses?")).token_ids == second.token_ids
