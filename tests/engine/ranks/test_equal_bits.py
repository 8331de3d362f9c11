"""Engines whose ranks are processes: tokens and log-probabilities are those of one rank, to the bit, whatever surrounds
a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore, close
from forebay.requests.sampling_params import SamplingParams
from tests.engine.test_sleep import ONE_OF_EACH, other_weights
from tests.kernels import NATIVE, VARIANTS
from tests.models.test_ranks import refusal_of
from tests.models.tiny import page_size_of, random_ids, shared_tiny

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU")

SHARED = random_ids(20, seed=1)
PROMPTS = [SHARED[:17] + random_ids(length, seed=length) for length in (1, 6, 12)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=9, temperature=1.1, top_k=40, seed=7, ignore_eos=True, logprobs=2)
# Each has one value of each dimension: the page size, chunks, graphs, host copies, overlapped steps, drafts.
SETTINGS: dict[str, dict[str, Any]] = {
    "page 1, chunks of 7, graphs": {"page_size": 1, "chunked_prefill_size": 7},
    "page 16, eager, overlapped": {"page_size": 16, "disable_cuda_graph": True, "overlap_depth": 1},
    "page 4, host copies, drafts": {
        "page_size": 4,
        "chunked_prefill_size": 16,
        "retraction_host_bytes": "2MiB",
        "max_total_tokens": 64,
        "schedule_conservativeness": 0.0,
        "speculative_algorithm": "NGRAM",
    },
}
# Types whose first checkpoint has three heads or groups, and one that has an even number.
EVEN = {
    "glm5_next_text": "glm5_next_text-published-fields",
    "kimi_linear": "kimi_linear-published-fields",
    "nemotron_h": "nemotron_h-no-attention",
}
SPLIT = [EVEN.get(case, case) for case in ONE_OF_EACH]


@contextmanager
def engine(case: str, path: Path, size: int, flags: Mapping[str, Any]) -> Iterator[EngineCore]:
    asked = {"model": str(path), "dtype": "float32", "kernels": NATIVE, "context_length": 48, "num_threads": 1}
    asked |= {"kv_cache_bytes": f"{size}MiB", "max_running_requests": 4, "cache_check_rate": 0, "host_cache_bytes": 0}
    asked |= {**flags, "page_size": page_size_of(case, flags["page_size"])}
    core, _ = build_engine(resolve({"tp_size": size, **asked}).engine)
    try:
        yield core
    finally:
        close(core)


def answers(core: EngineCore) -> list[Any]:
    """Return tokens and log-probabilities of each prompt, greedy and drawn. How many tokens come at once depends on
    drafts, whose number depends on the time of steps."""
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    for number, params in enumerate((GREEDY, DRAWN) * len(PROMPTS)):
        core.add(AddRequest(request_id=number + 1, prompt_token_ids=PROMPTS[number // 2], params=params))
    while not core.idle:
        for update in core.step():
            assert update.failure is None
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            logprobs.setdefault(update.request_id, []).extend(update.logprobs or ())
    return [(tokens[number], logprobs[number]) for number in sorted(tokens)]


def story(core: EngineCore, other: Path | None) -> list[Any]:
    """Answer when cold, from the cache, after a flush, from graphs of idle time, after a sleep, and with other
    weights."""
    found = [answers(core), answers(core)]
    core.scheduler.flush_cache()
    while core.in_idle_time():
        pass
    found.append(answers(core))
    for keep in (False, True):
        core.sleeper.keep_prefix_cache = keep
        core.sleeper.sleep()
        core.sleeper.wake()
        found.append(answers(core))
    if other is not None:
        core.sleeper.update(str(other), {})
        found.append(answers(core))
    return found


def check(case: str, named: str, folder: Path, *, size: int = 2, updates: bool = True) -> EngineCore:
    """Compare an engine of `size` ranks with one of one; return the former."""
    path, flags = shared_tiny(case).path, SETTINGS[named]
    other = other_weights(path, folder / "other") if updates else None
    with engine(case, path, 1, flags) as one, engine(case, path, size, flags) as ranks:
        assert story(ranks, other) == story(one, other)
        return ranks


@pytest.mark.parametrize(
    ("case", "named"),
    [pytest.param("llama", named, marks=pytest.mark.slow) for named in [*SETTINGS][:2]]
    + [("falcon_h1", [*SETTINGS][2])],
)
def test_ranks_as_processes_have_the_bits_of_one(case: str, named: str, tmp_path: Path) -> None:
    core = check(case, named, tmp_path)
    counters = core.scheduler.state(0.0).counters
    assert counters["cached_tokens"] > 0
    assert (counters["replayed_steps"] > 0) == ("eager" not in named)
    assert (counters["retractions_kept"] > 0) == ("host" in named)


@pytest.mark.slow
def test_ranks_that_exchange_through_gloo_have_the_bits_of_one(tmp_path: Path) -> None:
    """Steps of these run by their Python: no recording has the exchanges of a process group."""
    flags = SETTINGS["page 1, chunks of 7, graphs"] | {"tp_exchange": "gloo"}
    path, other = shared_tiny("llama").path, other_weights(shared_tiny("llama").path, tmp_path / "other")
    with engine("llama", path, 1, flags) as one, engine("llama", path, 2, flags) as ranks:
        assert story(ranks, other) == story(one, other)
        assert ranks.scheduler.state(0.0).counters["replayed_steps"] == 0


@pytest.mark.slow
def test_ranks_with_a_gpu_s_kernels_in_the_interpreter_have_the_bits_of_one() -> None:
    """They exchange by the kernel that graphs of a GPU capture, in memory that the ranks share."""
    pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
    flags = {"page_size": 4, "kernels": "triton-interpreter"}
    path, asked = shared_tiny("llama").path, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2)

    def answered(core: EngineCore) -> list[Any]:
        core.add(AddRequest(request_id=1, prompt_token_ids=PROMPTS[0][:8], params=asked))
        updates = [update for _ in iter(lambda: core.idle, True) for update in core.step()]
        return [(update.token_ids, update.logprobs) for update in updates]

    with engine("llama", path, 1, flags) as one, engine("llama", path, 2, flags) as ranks:
        assert answered(ranks) == answered(one) != []
        assert ranks.stats.counters["engine.steps_on_ranks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", SPLIT)
def test_ranks_as_processes_of_every_type_have_the_bits_of_one_or_are_refused(
    case: str, size: int, tmp_path: Path
) -> None:
    named = [*SETTINGS][(SPLIT.index(case) + size // 2) % len(SETTINGS)]
    path = shared_tiny(case).path
    if refusal_of(case, size):
        flags = {"model": str(path), "dtype": "float32", "kernels": NATIVE, "context_length": 48}
        with pytest.raises(ConfigError):
            build_engine(resolve({"tp_size": size, **flags}).engine)
    else:
        check(case, named, tmp_path, size=size, updates=False)
