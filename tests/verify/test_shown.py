"""C28: a circumstance counts as shown only if the engine's reports say that it happened to the compared requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.requests.updates import History, SpeculationReport
from forebay.runtime.graphs.runner import default_sizes
from forebay.verify.asking import Answer, Engines
from forebay.verify.circumstances import PLANTED, Circumstance, Room, circumstances
from forebay.verify.run import Verification
from tests.verify.test_verify import QUESTION, said, small_model, tokenizer

__all__ = ["small_model", "tokenizer"]  # fixtures


@pytest.fixture(scope="module")
def by_name(small_model: Path) -> dict[str, Circumstance]:
    given = {"model_path": str(small_model), "speculative_algorithm": "STANDALONE"}
    return {one.name: one for one in Verification(given, num=2, max_tokens=8, seed=0).circumstances}


def judged(circumstance: Circumstance, answer: Answer, count: Counter[str] | None = None) -> tuple[bool, bool]:
    """Return whether the circumstance is shown with this answer alone, and whether it touched it."""
    config = SimpleNamespace(scheduling=SimpleNamespace(chunked_prefill_size=2))
    engines: Any = SimpleNamespace(questions=[QUESTION], all=[(0, answer)], config=config, most_at_once=2)
    engines = cast(Engines, engines)
    return bool(circumstance.shown(engines, count or Counter())), circumstance.touched(engines, QUESTION, answer)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("num_chunks", "shown"), [(1, False), (2, True)])
def test_prompt_counts_as_cut_if_the_engine_computed_several_chunks(
    by_name: dict[str, Circumstance], num_chunks: int, shown: bool
) -> None:
    answer = replace(said([5]), history=History(num_chunks=num_chunks))
    assert judged(by_name["prompts in chunks"], answer) == (shown, shown)


@pytest.mark.parametrize(("num_chunks", "shown"), [(0, True), (1, False)])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_prompt_counts_as_come_over_if_the_decode_engine_computed_none_of_it(
    by_name: dict[str, Circumstance], backend: str, num_chunks: int, shown: bool
) -> None:
    answer = replace(said([5]), history=History(num_chunks=num_chunks))
    assert judged(by_name[f"prefill and decode apart, {backend}"], answer) == (shown, shown)


@pytest.mark.parametrize(("report", "touched"), [(None, False), (SpeculationReport(1.0, 1.0), True)])
def test_drafts_of_a_device_count_only_for_requests_that_had_some(
    by_name: dict[str, Circumstance], report: SpeculationReport | None, touched: bool
) -> None:
    answer = replace(said([5]), speculation=report)
    assert judged(by_name["drafts by STANDALONE"], answer, Counter(draft_tokens=3)) == (True, touched)


@pytest.mark.parametrize("num_replayed", [0, 3])
def test_graphs_count_only_for_requests_that_decoded_in_replayed_steps(
    by_name: dict[str, Circumstance], num_replayed: int
) -> None:
    answer = replace(said([5]), concurrency=2, history=History(num_replayed=num_replayed))
    shown = judged(by_name["all at once, from graphs"], answer, Counter(replayed_steps=5))
    assert shown == (True, bool(num_replayed))
    assert judged(by_name["all at once, from graphs"], answer) == (False, bool(num_replayed))


@pytest.mark.parametrize("num_padded", [0, 3])
def test_coming_and_going_counts_only_for_requests_of_padded_steps(num_padded: int) -> None:
    by_name = {one.name: one for one in circumstances(Room([QUESTION] * 16, 16), PLANTED, 1, {})}
    answer = replace(said([5]), concurrency=2, history=History(num_padded=num_padded))
    assert judged(by_name["coming and going"], answer) == (bool(num_padded), bool(num_padded))


def test_coming_and_going_of_few_requests_needs_no_padded_step() -> None:
    """A CPU has a graph of each size up to eight rows."""
    assert default_sizes(8, quickly=True) == [*range(1, 9)]
    by_name = {one.name: one for one in circumstances(Room([QUESTION] * 15, 16), PLANTED, 1, {})}
    for concurrency in (1, 2):
        _, touched = judged(by_name["coming and going"], replace(said([5]), concurrency=concurrency))
        assert touched is (concurrency > 1)


@pytest.mark.parametrize(("steps", "shown"), [(0, False), (3, True)])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_steps_planned_ahead_count_only_for_requests_that_they_decoded(
    by_name: dict[str, Circumstance], steps: int, shown: bool, num_ahead: int
) -> None:
    answer = replace(said([5]), concurrency=2, history=History(num_ahead=num_ahead))
    count = Counter({"engine.steps_ahead": steps})
    assert judged(by_name["steps planned ahead"], answer, count) == (shown, bool(num_ahead))


@pytest.mark.parametrize(("on_ranks", "shown"), [(0, False), (8, False), (9, True)])
def test_two_ranks_count_only_if_both_executed_every_step(
    by_name: dict[str, Circumstance], on_ranks: int, shown: bool
) -> None:
    answer = replace(said([5]), concurrency=2, history=History(num_replayed=3))
    count = Counter({"engine.steps": 9, "engine.steps_on_ranks": on_ranks, "replayed_steps": 5})
    assert judged(by_name["two ranks"], answer, count) == (shown, True)


@pytest.mark.parametrize("num_hot_loads", [0, 2])
@pytest.mark.parametrize("name", ["KV in two tiers", "all of it, KV in two tiers"])
def test_tiers_count_only_for_requests_whose_steps_loaded_into_hot_buffers(name: str, num_hot_loads: int) -> None:
    tiers = {"enable_hisparse": True}
    by_name = {one.name: one for one in circumstances(Room([QUESTION], 16), PLANTED, 1, tiers)}
    history = History(num_hot_loads=num_hot_loads)
    answer = replace(said([5]), concurrency=2, history=history, num_partly_accepted=1)
    count = Counter(hisparse_read_tokens=9, hisparse_loaded_tokens=4)
    assert judged(by_name[name], answer, count) == (True, bool(num_hot_loads))


def test_drafts_of_a_device_are_planned_ahead_and_those_of_the_host_are_not(by_name: dict[str, Circumstance]) -> None:
    """C12, C28: a GPU plans steps ahead, so that what a draft was promised is given back one step later."""
    on_device = {name for name, one in by_name.items() if one.flags.get("speculative_algorithm") == "STANDALONE"}
    assert on_device >= {"drafts by STANDALONE", "all of it, speculative", "all of it, prefill and decode"}
    assert all(by_name[name].flags["overlap_depth"] == 1 for name in on_device)
    planted = [
        one for one in circumstances(Room([QUESTION], 16), PLANTED, 1, {}) if PLANTED.items() <= one.flags.items()
    ]
    assert planted
    assert not any("overlap_depth" in one.flags for one in planted)


def test_drafts_of_a_device_are_made_with_pages_of_one_token_too(by_name: dict[str, Circumstance]) -> None:
    """C18: a larger page holds the tokens behind a window that a step reads if a draft is rejected."""
    assert by_name["drafts by STANDALONE, pages of one token"].flags["page_size"] == 1
    assert "page_size" not in by_name["drafts by STANDALONE"].flags


def test_decode_engine_with_little_memory_retracts_to_the_host(by_name: dict[str, Circumstance]) -> None:
    """C26: it keeps no memory for answers, and has not enough for two. The windows of all that has come over stay in
    the prefix cache only where memory is plenty."""
    one = by_name["prefill and decode apart, shm"]
    assert one.flags["num_reserved_decode_tokens"] == 1
    assert one.flags["retraction_host_bytes"] > 0
    assert one.flags["max_total_tokens"] == by_name["retracted"].flags["max_total_tokens"]
    assert "max_total_tokens" not in one.prefill_flags
    for name in ("prefill and decode apart, tcp", "all of it, prefill and decode"):
        assert "max_total_tokens" not in by_name[name].flags


def test_prefill_engine_of_all_of_it_has_the_proposer_of_the_device(by_name: dict[str, Circumstance]) -> None:
    """C16: what the proposer keeps of a prompt comes over with it. Planted drafts keep nothing."""
    name = "all of it, prefill and decode"
    assert by_name[name].prefill_flags["speculative_algorithm"] == "STANDALONE"
    (planted,) = (one for one in circumstances(Room([QUESTION], 16), PLANTED, 1, {}) if one.name == name)
    assert "speculative_algorithm" not in planted.prefill_flags
