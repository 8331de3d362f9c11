"""Counters by name: what they count is said in a sentence, and the name is no sentence."""

from __future__ import annotations

import re

import pytest

from forebay.scheduler.counters import COUNTERS, Counter


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.name)
def test_counter_has_a_name_of_words_and_a_sentence_that_says_what_it_counts(counter: Counter) -> None:
    assert re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)?", counter.name), counter
    assert not counter.text or re.fullmatch(r"[A-Z][^_]+ [^_]+", counter.text), counter


def test_counters_have_names_of_their_own() -> None:
    assert len({counter.name for counter in COUNTERS}) == len(COUNTERS)
