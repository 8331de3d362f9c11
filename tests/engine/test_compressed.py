"""Compressed attention through whole engines: equal tokens whatever the pages, chunks, hits, retractions and drafts."""

from __future__ import annotations

from typing import Any, Final

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.requests.sampling_params import SamplingParams
from tests.engine.conftest import is_greedy
from tests.kernels import NATIVE
from tests.models.tiny import Tiny, random_ids, shared_tiny

FLAGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "kernels": NATIVE,
    "kv_cache_bytes": "64MiB",
    "page_size": 8,
    "max_total_tokens": 1024,
    "max_running_requests": 6,
    "context_length": 128,
    "schedule_conservativeness": 0.1,
}
NUM_TOKENS: Final = 40
VARIED: Final[dict[str, dict[str, Any]]] = {
    "chunks": {"chunked_prefill_size": 7},
    "larger pages": {"page_size": 24},
    "no prefix cache": {"disable_radix_cache": True},
    "no overlap": {"overlap_depth": 0},
    "drafts": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    "wide drafts": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 9},
    "retraction": {"max_total_tokens": 144, "chunked_prefill_size": 16},
    "host copies": {"max_total_tokens": 144, "retraction_host_bytes": "64MiB"},
    "drafts and host copies": {
        "max_total_tokens": 144,
        "retraction_host_bytes": "64MiB",
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
    },
}
RETRACTED: Final = {"retraction", "host copies", "drafts and host copies"}


def prompts() -> list[list[int]]:
    """Prompts that share beginnings of several lengths, one of them of whole pages; with tokens that come again, so
    that there is something to guess."""
    first, repeated = random_ids(32, seed=1), random_ids(5, seed=2) * 5
    own = [random_ids(3 + 4 * i, seed=20 + i) for i in range(4)]
    return [first + part for part in own] + [repeated, repeated + own[0], first[:17] + own[1], first]


@pytest.fixture(scope="module")
def model() -> Tiny:
    return shared_tiny("deepseek_v4")


def run(model: Tiny, flags: dict[str, Any]) -> tuple[list[list[int]], dict[str, float]]:
    """Return the tokens of all prompts, twice, and the scheduler's counters."""
    core, _ = build_engine(resolve({"model": str(model.path), **FLAGS, **flags}).engine)
    found = [*tokens_of(core), *tokens_of(core)]
    return found, dict(core.scheduler.state(0.0).counters)


def tokens_of(core: EngineCore) -> list[list[int]]:
    """Return the tokens of all prompts, which are asked for at once."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: dict[int, list[int]] = {}
    for request_id, prompt in enumerate(prompts(), start=1):
        assert core.add(AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params)) == []
        tokens[request_id] = []
    while not core.idle:
        for update in core.step():
            assert update.failure is None
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


@pytest.fixture(scope="module")
def expected(model: Tiny) -> list[list[int]]:
    found, _ = run(model, {})
    asked = prompts()
    assert found[len(asked) :] == found[: len(asked)], "the second time there are hits"
    assert all(is_greedy(model, prompt, tokens) for prompt, tokens in zip(asked, found, strict=False))
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", VARIED)
def test_tokens_are_the_same_in_all_circumstances(name: str, model: Tiny, expected: list[list[int]]) -> None:
    found, counters = run(model, VARIED[name])
    assert found == expected
    assert (counters["retractions"] > 0) == (name in RETRACTED)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_types_of_what_is_kept_give_the_same_tokens_however_cut(dtype: str, model: Tiny) -> None:
    found, _ = run(model, {"kv_cache_dtype": dtype})
    assert found == run(model, {"kv_cache_dtype": dtype, "chunked_prefill_size": 5, "page_size": 16})[0]


def test_a_page_size_without_whole_entries_is_refused(model: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"--page-size \(12\): layers of .* keep entries of 8 tokens: give 16"):
        resolve({"model": str(model.path), **FLAGS, "page_size": 12})
