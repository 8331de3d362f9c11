"""N-gram guesses against their definition, by looking at every place; and what is kept of whom, and for how long."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.speculation.last_places import LastPlaces
from forebay.speculation.ngram import Ngram

DEPTH = 6
FEW_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


class EachAStep(Ngram):
    """Each proposal is that of a step of its own."""

    def propose(self, req: Request, most: int) -> Sequence[int]:
        self.begin_step(1)
        return super().propose(req, most)


def ngram(capacity: int = 1 << 10) -> Ngram:
    return EachAStep(SpeculationOptions(ngram_max_trie_depth=DEPTH, ngram_capacity=capacity))


def request(tokens: Sequence[int], id: int = 1, namespace: str = "") -> Request:
    return Request(id, tokens, SamplingParams(max_tokens=64), namespace=namespace)


def grown(id: int, prompt: Sequence[int], output: Sequence[int], namespace: str = "") -> Request:
    req = request(prompt, id, namespace)
    req.tokens.extend(output)
    return req


def in_common(text: Sequence[int], place: int, tokens: Sequence[int], end: int) -> int:
    """How many tokens before `place` are those before `end`, up to the depth."""
    return next((n for n in range(DEPTH) if n >= min(place, end) or text[place - 1 - n] != tokens[end - 1 - n]), DEPTH)


def latest(text: Sequence[int], wanted: Sequence[int], before: int) -> int:
    """Behind the latest place at which `wanted` stands, 0 for none."""
    n = len(wanted)
    return next((place for place in range(before, n - 1, -1) if list(text[place - n : place]) == list(wanted)), 0)


def own_guess(tokens: list[int], most: int, first: int = 1, by: int = 1) -> list[int]:
    """The definition: `first` tokens are seen at first, then `by` more at a time."""
    place = 0
    for start, end in itertools.pairwise([0, *range(min(first, len(tokens)), len(tokens), by), len(tokens)]):
        if place and tokens[place : place + end - start] == tokens[start:end]:
            place += end - start
        else:
            pair = latest(tokens, tokens[end - 2 : end], end - 1) if end > 1 else 0
            place = pair or latest(tokens, tokens[end - 1 : end], end - 1)
    count = min(most, in_common(tokens, place, tokens, len(tokens)))
    guesses: list[int] = []
    for i in range(count):
        guesses.append([*tokens, *guesses][place + i])
    return guesses


@given(tokens=FEW_TOKENS, most=st.integers(1, 9), first=st.integers(1, 40), by=st.integers(1, 5))
def test_guesses_are_what_followed_the_match_in_its_own_tokens(tokens: list[int], most: int, first: int, by: int):
    """However many tokens came between two calls."""
    proposer, req = ngram(), request(tokens[:first])
    guesses = proposer.propose(req, most)
    for start in range(first, len(tokens), by):
        req.tokens.extend(tokens[start : start + by])
        guesses = proposer.propose(req, most)
    assert list(guesses) == own_guess(tokens, most, first, by)


@given(tokens=st.lists(st.integers(0, 9), min_size=65, max_size=192), more=FEW_TOKENS)
def test_a_prompt_read_at_once_gives_the_matches_of_one_read_token_by_token(tokens: list[int], more: list[int]):
    at_once, bit_by_bit = ngram(), ngram()
    req, growing = request(tokens), request(tokens[:1])
    at_once.propose(req, 4)
    for token in tokens[1:]:
        growing.tokens.append(token)
        bit_by_bit.propose(growing, 4)
    marker = [10, tokens[-1]]  # a token that never was, and so the end of every match
    for token in marker + more:
        req.tokens.append(token)
        growing.tokens.append(token)
        assert list(at_once.propose(req, 4)) == list(bit_by_bit.propose(growing, 4))


OUTPUTS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 5), max_size=12)), max_size=12)


@given(outputs=OUTPUTS, tokens=FEW_TOKENS, capacity=st.integers(1, 30))
def test_what_is_kept_is_the_latest_outputs_and_within_the_capacity(
    outputs: list[tuple[str, list[int]]], tokens: list[int], capacity: int
):
    proposer = ngram(capacity)
    kept: list[tuple[str, list[int]]] = []
    for id, (namespace, output) in enumerate(outputs, start=2):
        proposer.ended(grown(id, [9], output, namespace))
        if len(output[-capacity:]) > 2:
            kept.append((namespace, output[-capacity:]))
        while sum(len(output) for _, output in kept) > capacity:
            del kept[0]
        assert proposer.num_kept_tokens == sum(len(output) for _, output in kept) <= capacity
    for namespace in "ab":
        guesses = list(proposer.propose(request(tokens, ord(namespace), namespace), 1))
        of_pair = [output for who, output in kept if who == namespace and latest(output[:-1], tokens[-2:], len(output))]
        own = own_guess(tokens, 1, len(tokens))
        if guesses != own:  # then they are those of the latest output that has the pair
            output = of_pair[-1]
            place = latest(output, tokens[-2:], len(output) - 1)
            assert len(tokens) > 1
            assert guesses == output[place : place + 1]


def test_a_longer_match_in_an_output_wins_over_one_in_its_own_tokens():
    proposer = ngram()
    proposer.ended(grown(1, [9], [1, 2, 3, 4, 5, 6]))
    assert list(proposer.propose(request([3, 8, 1, 2, 3], id=2), 8)) == [4, 5, 6]
    assert list(proposer.propose(request([2, 3, 8, 2, 3], id=3), 8)) == [8, 2]


def test_no_token_comes_from_another_namespace():
    """C29: not even where pairs of two namespaces share a slot."""
    proposer = ngram()
    proposer._kept_places = LastPlaces(2, np.int64)
    proposer.ended(grown(1, [9], [1, 2, 3, 4, 5, 6], "theirs"))
    for i in range(16):
        assert list(proposer.propose(request([1, 2, 4, 5], 2 + i, f"ours {i}"), 8)) == []
    assert list(proposer.propose(request([1, 2, 4, 5], 99, "theirs"), 8)) == [6]


def test_a_match_is_trusted_for_as_many_tokens_as_it_has_itself():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    proposer, req = ngram(), request([*text, 0, 1])
    lengths = [len(proposer.propose(req, 8))]
    for token in text[1:]:
        req.tokens.append(token)
        lengths.append(len(proposer.propose(req, 8)))
    assert lengths == [1, 2, 3, 4, 5, DEPTH, DEPTH, DEPTH, DEPTH]


def test_ngram_match_in_an_output_is_trusted_for_as_many_tokens_as_it_has_itself():
    proposer, req = ngram(), request([11, 1, 2], id=2)
    proposer.ended(grown(1, [9], list(range(1, 10))))
    lengths = [len(proposer.propose(req, 8))]
    for token in (3, 4, 5):
        req.tokens.append(token)
        lengths.append(len(proposer.propose(req, 8)))
    assert lengths == [2, 3, 4, 4], "of the last one the output ends"


def test_ngram_match_in_an_output_has_the_last_two_tokens():
    """One slot for all pairs, whose latest place is behind another token and the same last one."""
    proposer = ngram()
    proposer._kept_places = LastPlaces(1, np.int64)
    proposer._kept_places._mask = 0
    proposer.ended(grown(1, [9], [5, 3, 7]))
    proposer._kept_places._places[:] = (1 << 32) | 2
    assert list(proposer.propose(request([8, 4, 3], id=2), 8)) == []
    assert list(proposer.propose(request([8, 5, 3], id=3), 8)) == [7]


def test_what_repeats_goes_on_repeating():
    assert list(ngram().propose(request([1, 2, 1, 2, 1, 2]), 8)) == [1, 2, 1, 2]


def test_nothing_is_kept_of_a_request_that_has_ended():
    proposer = ngram()
    for id in range(1, 4):
        req = request([1, 2, 1], id)
        proposer.propose(req, 4)
        proposer.ended(req)
    assert (proposer._readers, proposer._outputs) == ({}, {})


def test_outputs_of_other_weights_are_no_guide():
    proposer, again = ngram(), request([9, 1, 2], 2)
    proposer.ended(grown(1, [9], [1, 2, 3, 4, 5]))
    again.compute_with(1)
    assert not proposer.propose(again, 3)
    assert list(proposer.propose(request([9, 1, 2], 3), 2)) == [3, 4]


def test_ngram_prompt_of_100000_tokens_is_indexed_in_slices_of_the_effort_of_a_step():
    """C27: the first look at a long prompt holds up no step; each step indexes a part, until all of it is found."""
    proposer = Ngram(SpeculationOptions(ngram_max_trie_depth=DEPTH))
    prompt = [200 + i % 50_000 for i in range(100_000)]
    prompt[90_000:90_004] = [101, 102, 103, 104]
    req = request([*prompt, 101, 102])
    indexed, drafts = [0], []
    while not drafts:
        proposer.begin_step(1)
        drafts = proposer.propose(req, 3)
        indexed.append(proposer._readers[1].num_indexed)
        assert 0 < indexed[-1] - indexed[-2] <= 16 * 1026
        req.tokens.extend([len(indexed), 101, 102])  # a token that never stood there ends the match
    assert len(indexed) > 6
    assert list(drafts) == [103, 104], "a match of two tokens drafts two"


def test_ngram_step_with_1024_requests_stops_indexing_when_its_effort_is_used_up():
    proposer = Ngram(SpeculationOptions())
    reqs = [request([(i * j) % 997 for j in range(2000)], id=i) for i in range(1, 1025)]
    proposer.begin_step(len(reqs))
    for req in reqs:
        proposer.propose(req, 8)
    indexed = sum(reader.num_indexed for reader in proposer._readers.values())
    assert 0 < indexed <= 16 * (1024 + 2 * 1024)
    for _ in range(60):
        proposer.begin_step(len(reqs))
        for req in reqs:
            req.tokens.append(req.id)
            proposer.propose(req, 8)
    assert all(reader.num_indexed > 1990 for reader in proposer._readers.values()), "every request gets its turn"


@given(tokens=st.lists(st.integers(0, 60_000), min_size=1, max_size=200), first=st.integers(0, 150))
def test_last_places_added_in_bulk_equal_those_added_one_by_one(tokens: list[int], first: int):
    one_by_one, bulk = LastPlaces(256, np.int32), LastPlaces(256, np.int32)
    text, first = array("i", tokens), min(first, len(tokens) - 1)
    one_by_one.add(text, first, len(text))
    bulk.add_many(text, first, len(text))
    assert bytes(one_by_one._slots) == bytes(bulk._slots)


@given(tokens=st.lists(st.integers(0, 9), min_size=3, max_size=60), first=st.integers(1, 50))
def test_last_places_one_token_added_and_the_next_looked_up_at_once_are_as_one_after_the_other(
    tokens: list[int], first: int
):
    apart, at_once = LastPlaces(64, np.int32), LastPlaces(64, np.int32)
    text, first = array("i", tokens), min(first, len(tokens) - 2)
    for places in (apart, at_once):
        places.add(text, 0, first)
    for end in range(first + 1, len(text)):
        apart.add(text, end - 1, end)
        found = at_once.add_and_find(*text[end - 2 : end + 1], end)
        assert found == (apart.of_pair(text[end - 1], text[end]), apart.of_single(text[end]))
    assert bytes(apart._slots) == bytes(at_once._slots)


def test_ngram_index_of_a_request_takes_at_most_48_bytes_a_token():
    for num_tokens in (1000, 20_000, 65_535, 65_536, 100_000):
        proposer = Ngram(SpeculationOptions(ngram_capacity=1 << 10))
        proposer.begin_step(1)
        proposer.propose(request(range(num_tokens)), 4)
        assert proposer._readers[1].places.num_slots * 4 <= 48 * num_tokens


def test_ngram_slot_taken_over_by_another_pair_gives_no_wrong_match():
    """With two slots for all pairs nearly every look-up returns the place of another pair."""
    proposer = ngram()
    proposer._kept_places = LastPlaces(2, np.int64)
    for id in range(2, 40):
        proposer.ended(grown(id, [9], [id, id + 1, id + 2, id + 3], "a"))
    found = [list(proposer.propose(request([id, id + 1], 1000 + id, "a"), 2)) for id in range(2, 41)]
    assert all(guess in ([], [id + 2, id + 3][: len(guess)]) for id, guess in enumerate(found, 2))
    assert found[-1] == [42], "the newest pair is found"
