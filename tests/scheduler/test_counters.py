"""Counters by name: what they count is said in a sentence, and the name is no sentence."""

from __future__ import annotations

import re

from forebay.scheduler.counters import COUNTERS, Counter
from tests.scheduler.rig import Rig
from tests.together import together


@together("counter", COUNTERS)
def test_counter_has_a_name_of_words_and_a_sentence_that_says_what_it_counts(counter: Counter) -> None:
    assert re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)?", counter.name), counter
    assert not counter.text or re.fullmatch(r"[A-Z][^_]+ [^_]+", counter.text), counter


def test_counters_have_names_of_their_own() -> None:
    assert len({counter.name for counter in COUNTERS}) == len(COUNTERS)


def test_counters_of_a_hit_and_an_abort_are_those_of_each_event() -> None:
    rig, prompt = Rig(page_size=4), [5 * i + 1 for i in range(10)]
    rig.add(prompt, max_new=4)
    rig.run()
    rig.add([*prompt[:9], 3], max_new=2)
    aborted = rig.add(12, max_new=30)
    rig.step()
    rig.step()
    rig.abort(aborted.id)
    rig.run()
    assert {name: count for name, count in rig.scheduler.state(0.0).counters.items() if count} == {
        "requests": 3,
        "prompt_tokens": 10 + 10 + 12,
        "cached_tokens": 8,  # two pages of the first prompt
        "computed_prompt_tokens": 10 + 2 + 12,
        "generated_tokens": 4 + 2 + 2,
        "steps": 4 + 2,
        "misses.none": 1,
        "misses.no_shared_prefix": 2,
        "finished.length": 2,
        "finished.abort": 1,
    }
