"""From tokens to text: any tokens, any stop strings, in any portions."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from forebay.text.detokenizer import Detokenizer, decode
from tests.fuzz.mutants import fuzz, mutated, pieces, seeds
from tests.text.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(600)
TEXTS = [
    "hello world STOP here",
    "é🎉日本 ST🎉OP",
    "aaaaab aaab aab",
    "STSTOSTOP",
    "x\0y\r\n\n  z",
    "hello hello world",
]


class Case(NamedTuple):
    portions: list[list[int]]
    stop: tuple[str, ...]
    include_stop: bool


def make_case(rng: random.Random) -> Case:
    text = mutated(rng, TEXTS).encode("utf-8", "replace").decode()
    ids = TOKENIZER.encode(text)
    for _ in range(rng.choice([0, 0, 1, 5])):  # bytes that are no text
        ids.insert(rng.randint(0, len(ids)), rng.randrange(600))
    whole = decode(TOKENIZER.table, ids)
    stop = []
    for _ in range(rng.randrange(4)):
        at = rng.randint(0, len(whole))
        stop.append(rng.choice([whole[at : at + rng.randint(1, 6)], mutated(rng, TEXTS)[:8], "\ufffd"]) or "a")
    at = 0
    portions = []
    while at < len(ids):
        size = rng.choice([1, 1, 2, 5, 100])
        portions.append(ids[at : at + size])
        at += size
    return Case(portions, tuple(stop), rng.random() < 0.3)


def told(case: Case, portions: list[list[int]]) -> tuple[str, str | None, int]:
    """What is shown, the stop string that ended it, and how many tokens it took."""
    detokenizer, shown, used = Detokenizer(TOKENIZER.table, case.stop, include_stop=case.include_stop), "", 0
    for portion in portions:
        delta = detokenizer.push(portion)
        shown, used = shown + delta.text, used + delta.used
        assert detokenizer.num_chars == len(shown)
        if delta.stopped is not None:
            return shown, delta.stopped, used
    tail = detokenizer.finish()
    assert detokenizer.num_chars == len(shown + tail.text)
    return shown + tail.text, tail.stopped, used


def check(case: Case) -> None:
    ids = [token for portion in case.portions for token in portion]
    shown, stopped, used = told(case, case.portions)
    assert (shown, stopped, used) == told(case, [[token] for token in ids])
    whole = decode(TOKENIZER.table, ids)
    first = min((at for stop in case.stop if (at := whole.find(stop)) >= 0), default=-1)
    if first < 0:
        assert (shown, stopped, used) == (whole, None, len(ids))
        return
    assert stopped in case.stop
    at = len(shown) - len(stopped) if case.include_stop else len(shown)
    assert whole.startswith(shown)
    assert whole.startswith(stopped, at)
    # Whoever is complete first wins, and of those the one that begins first: nothing before it could have ended it.
    assert not any(stop in whole[: at + len(stopped) - 1] and whole.find(stop) < at for stop in case.stop)
    if not case.include_stop:
        assert not any(stop in shown for stop in case.stop)


@pytest.mark.parametrize("seed", seeds(1, 60))
def test_c7_d7_text_is_the_same_in_any_portions_and_ends_at_its_stop_string(seed: int) -> None:
    fuzz(seed, 400, make_case, check)


def operations(work: Callable[[], Any]) -> int:
    """Calls made, of Python's own functions and of C's: what a clock would say on a machine that is never busy."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("letter", ["a", "ab", "\ufffd"])
def test_d7_a_text_that_always_looks_like_a_stop_string_costs_by_its_length(letter: str) -> None:
    ids = TOKENIZER.encode("a" * 4000)
    stop = tuple((letter * 255)[: 255 - i] + "!" for i in range(4))

    def work(count: int) -> Callable[[], Any]:
        return lambda: [Detokenizer(TOKENIZER.table, stop).push(ids[i : i + 1000]) for i in range(0, count, 1000)]

    assert operations(work(4000)) <= 2.5 * operations(work(2000))


def test_pieces_are_the_whole() -> None:
    for seed in range(20):
        assert "".join(pieces(random.Random(seed), TEXTS[0])) == TEXTS[0]
