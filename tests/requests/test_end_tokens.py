"""End tokens of an engine, in the order in which they were named."""

from __future__ import annotations

from forebay.requests.end_tokens import EndTokens


def test_end_tokens_are_those_of_the_vocabulary_each_once_in_their_order() -> None:
    ends = EndTokens([7, 0, 7, 9], vocab_size=10)
    assert ends.ids == (7, 0, 9)
    ends.add([-1, 3, 10, 0])
    assert (ends.ids, ends.vocab_size) == ((7, 0, 9, 3), 10)
    assert EndTokens(vocab_size=10).ids == ()
