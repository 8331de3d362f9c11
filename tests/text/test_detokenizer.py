from __future__ import annotations

import random

import pytest

from forebay.text.detokenizer import Detokenizer, decode
from tests.text.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(600)
SAMPLES = ["hello world STOP here", "é🎉日本 ST🎉OP", "aaaaab aaab", "STSTOP", "no end S", "x\0y\r\n\n  z"]


def stream(ids: list[int], stop: tuple[str, ...], cuts: random.Random | None) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(TOKENIZER.table, stop)
    shown = []
    while ids:
        size = cuts.randint(1, 4) if cuts else len(ids)
        delta = detokenizer.push(ids[:size])
        shown.append(delta.text)
        if delta.stopped is not None:
            return shown, delta.stopped
        ids = ids[size:]
    tail = detokenizer.finish()
    return [*shown, tail.text], tail.stopped


@pytest.mark.parametrize("seed", range(60))
def test_deltas_joined_are_the_whole_text_up_to_the_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:  # bytes that are no UTF-8 at all
        ids = [rng.randrange(600) for _ in range(30)]
    else:
        ids = TOKENIZER.encode(rng.choice(SAMPLES))
    stop = tuple(rng.sample(["STOP", "ST", "🎉", "aab", "zz", "\n  "], rng.randint(0, 3)))
    whole = decode(TOKENIZER.table, ids)
    expected = whole[: min((place for s in stop if (place := whole.find(s)) >= 0), default=len(whole))]
    shown, stopped = stream(ids, stop, rng)
    assert "".join(shown) == expected
    assert (stopped is not None) == (expected != whole)


def test_half_a_character_is_never_shown() -> None:
    shown, _ = stream(TOKENIZER.encode("🎉"), (), random.Random(0))
    assert [text for text in shown if text] == ["🎉"]


def test_the_beginning_of_a_stop_string_is_held_until_it_is_none() -> None:
    detokenizer = Detokenizer(TOKENIZER.table, ("STOP",))
    assert [detokenizer.push([token]).text for token in TOKENIZER.encode("aSTOx")] == ["a", "", "", "", "STOx"]


class OneTokenEach:
    """Tokens that are whole texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def in_text(self, token: int) -> bytes:
        return self._texts[token].encode()


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped"),
    [
        (["hello"], ("lo", "ello"), "h", "ello"),  # of those that a token completes, the one that begins first
        (["hello"], ("ello", "lo"), "h", "ello"),
        (["hello"], ("ell", "ello"), "h", "ell"),  # of those that begin there, the one that was named first
        (["hello"], ("ello", "ell"), "h", "ello"),
        (["he", "l", "l", "o"], ("ello", "ll"), "he", "ll"),  # but the first to be complete ends the text
        (["he", "l", "lo"], ("ello", "ell"), "h", "ello"),
    ],
)
def test_which_of_two_stop_strings_ends_the_text(pieces, stop, shown, stopped) -> None:
    detokenizer = Detokenizer(OneTokenEach(*pieces), stop)
    delta = detokenizer.push(list(range(len(pieces))))
    assert (delta.text, delta.stopped) == (shown, stopped)


@pytest.mark.parametrize("how", ["stop", "patterns"])
@pytest.mark.parametrize(
    ("pieces", "min_tokens", "shown"),
    [
        (["ab", "ab", "c"], 0, ""),
        (["ab", "ab", "c"], 1, "ab"),
        (["ab", "a", "b", "c"], 1, "ab"),
        (["aba", "b", "ab"], 2, "abab"),
        (["ab", "ab", "ab"], 3, None),
    ],
)
def test_no_stop_counts_that_ends_before_the_least_length(how, pieces, min_tokens, shown) -> None:
    detokenizer = Detokenizer(OneTokenEach(*pieces), **{how: ("ab",)}, min_tokens=min_tokens)
    delta = detokenizer.push(list(range(len(pieces))))
    assert (delta.text, delta.stopped) == (("".join(pieces), None) if shown is None else (shown, "ab"))


def test_of_a_stop_string_the_beginning_may_be_before_the_least_length() -> None:
    assert Detokenizer(OneTokenEach("xa", "b"), ("ab",), min_tokens=1).push([0, 1]).stopped == "ab"


def test_stop_string_is_kept_when_asked_for() -> None:
    detokenizer = Detokenizer(TOKENIZER.table, ("STOP",), include_stop=True)
    assert detokenizer.push(TOKENIZER.encode("aSTOPb")).text == "aSTOP"


def test_offsets_are_where_tokens_begin_in_the_text() -> None:
    ids = TOKENIZER.encode("é hello")
    detokenizer = Detokenizer(TOKENIZER.table)
    text = detokenizer.push(ids).text
    assert detokenizer.offsets[:2] == [0, 0]  # both halves of é
    assert text[detokenizer.offsets[-1] :] == "hello"
