"""What a larger prefix cache would reuse: the estimate from keys alone beside real caches of those sizes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from forebay.memory.ghosts import FACTORS, Ghosts
from forebay.memory.radix_cache import RadixCache
from forebay.memory.slots import Slots

PAGE = 4


def trace(seed: int, num_requests: int = 300) -> Iterator[tuple[list[int], int]]:
    """Prompts with their answers, and the lengths of the prompts: conversations that go on, of which some are much more
    active than others, new ones with one of three system texts, and one-off prompts."""
    rng = Random(seed)
    systems = [[rng.randrange(1000) for _ in range(rng.randrange(8, 40))] for _ in range(3)]
    talks: list[list[int]] = []
    for _ in range(num_requests):
        if talks and rng.random() < 0.7:
            talk = talks[int(len(talks) * rng.random() ** 2)]
        else:
            talk = list(rng.choice(systems)) if rng.random() < 0.8 else []
            talks.insert(rng.randrange(len(talks) + 1), talk)
        talk += [rng.randrange(1000) for _ in range(rng.randrange(4, 30))]
        num_prompt = len(talk)
        talk += [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        yield list(talk), num_prompt
        if len(talk) > 300:
            talks.remove(talk)


class Cache:
    """A prefix cache with so many pages, asked by one request after another; `reused` counts prompt tokens."""

    def __init__(self, num_pages: int) -> None:
        self.kv = Slots("kv", num_pages)
        self.tree = RadixCache(self.kv, PAGE)
        self.reused = 0

    def request(self, tokens: list[int], num_prompt: int) -> int:
        """Return the number of prompt tokens that were cached, and cache all whole pages."""
        key = array("i", tokens).tobytes()
        match = self.tree.index.match(key[: 4 * (num_prompt - 1)])
        pin = self.tree.pin(match)
        num_new = len(tokens) // PAGE - pin.num_pages
        self.tree.evict(max(0, num_new - self.kv.num_free))
        pages = self.kv.take_ids(num_new, 1)
        replaced = self.tree.extend_pin(pin, key[: 4 * PAGE * (len(tokens) // PAGE)], pages, 1).replaced
        self.kv.return_ids(pages[: len(replaced)], 1)
        self.tree.unpin(pin)
        self.reused += match.num_tokens
        return match.num_tokens


def recorded(ghosts: Ghosts, seed: int, num_pages: int) -> tuple[int, int]:
    """Replay a trace with a cache of `num_pages`; the prompt tokens, and those that were reused."""
    cache, num_prompt_tokens = Cache(num_pages), 0
    for tokens, num_prompt in trace(seed):
        reused = cache.request(tokens, num_prompt)
        ghosts.record(tokens, num_prompt, namespace="", tenant="", reused=reused, used_pages=0)
        num_prompt_tokens += num_prompt
    return num_prompt_tokens, cache.reused


@pytest.mark.parametrize(("seed", "num_pages"), [(1, 120), (2, 250), (3, 500)])
def test_ghosts_estimate_what_caches_of_twice_and_four_times_the_size_reuse(seed: int, num_pages: int) -> None:
    ghosts = Ghosts(PAGE, {"device": num_pages})
    total, reused = recorded(ghosts, seed, num_pages)
    found = ghosts.estimates()[""]
    assert (found.prompt_tokens, found.reused_tokens) == (total, reused)
    for factor, estimate in zip(FACTORS, found.by_tier["device"], strict=True):
        larger = Cache(factor * num_pages)
        for tokens, num_prompt in trace(seed):
            larger.request(tokens, num_prompt)
        assert abs(estimate - larger.reused) <= 0.02 * total, (factor, estimate / total, larger.reused / total)
    assert found.by_tier["device"][2] > found.by_tier["device"][0]  # else the sizes tell nothing


@pytest.mark.parametrize("seed", [1, 2])
def test_ghosts_of_some_pages_alone_estimate_nearly_the_same(seed: int) -> None:
    whole, some = Ghosts(PAGE, {"device": 200}), Ghosts(PAGE, {"device": 200}, most=200)  # a fourth of the pages
    total, _ = recorded(whole, seed, 200)
    recorded(some, seed, 200)
    estimates = (ghosts.estimates()[""].by_tier["device"] for ghosts in (whole, some))
    for exact, sampled in zip(*estimates, strict=True):
        assert abs(exact - sampled) <= 0.08 * total


def test_ghosts_take_a_bounded_number_of_bytes_whatever_is_asked() -> None:
    ghosts = Ghosts(1, {"device": 1000}, most=500)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ghosts.record(rng.integers(1000, size=900).tolist(), 900, namespace="", tenant="", reused=0, used_pages=0)
    table = ghosts._table
    assert np.count_nonzero(table.keys) <= 1.2 * 501
    assert sum(column.nbytes for column in (table.keys, table.request, table.place)) <= 24 * 501 + 16 * 16


def test_ghosts_of_requests_without_a_page_of_their_own_are_dropped() -> None:
    ghosts = Ghosts(1, {"device": 1000})
    for _ in range(3000):
        ghosts.record([1, 2, 3], 3, namespace="", tenant="", reused=0, used_pages=0)
    assert len(ghosts._size) <= 1024 + 2
    assert ghosts.estimates()[""].by_tier["device"] == [2 * 2999] * 3


def test_ghosts_of_a_smaller_tier_beside_a_larger_one_bring_nothing() -> None:
    ghosts = Ghosts(PAGE, {"device": 100, "host": 400})
    recorded(ghosts, 4, 100)
    device, host = (ghosts.estimates()[""].by_tier[name] for name in ("device", "host"))
    assert device[0] == device[2] == host[0]
    assert host[2] > host[0]


def test_ghosts_pages_of_running_requests_are_no_caches() -> None:
    ghosts = Ghosts(1, {"device": 10})
    for used_pages in (0, 0, 0, 35, 37):
        ghosts.record([*range(5)], 5, namespace="", tenant="", reused=0, used_pages=used_pages)
    assert ghosts.estimates()[""].by_tier["device"] == [8, 8, 8 + 4 + 3]


def test_ghosts_are_of_one_namespace_and_one_tenant() -> None:
    ghosts = Ghosts(1, {"device": 7})
    for namespace, tenant in (("a", "alice"), ("b", "bob"), ("a", "alice"), ("b", "alice")):
        ghosts.record([*range(5)], 5, namespace=namespace, tenant=tenant, reused=0, used_pages=0)
    found = ghosts.estimates()
    assert (found["alice"].prompt_tokens, found["alice"].by_tier["device"]) == (15, [4, 8, 8])
    assert (found["bob"].prompt_tokens, found["bob"].by_tier["device"]) == (5, [0, 0, 0])


def test_ghosts_are_gone_after_a_flush_and_the_counts_stay() -> None:
    ghosts = Ghosts(1, {"device": 10})
    for _ in range(2):
        ghosts.record([1, 2, 3], 3, namespace="", tenant="", reused=0, used_pages=0)
        ghosts.clear()
    assert ghosts.estimates()[""].by_tier["device"] == [0, 0, 0]
    assert ghosts.estimates()[""].prompt_tokens == 6


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_ghosts_prompt_without_a_whole_page_is_counted_alone(num_tokens: int) -> None:
    ghosts = Ghosts(PAGE, {"device": 10})
    for _ in range(2):
        ghosts.record([1] * num_tokens, num_tokens, namespace="", tenant="", reused=0, used_pages=0)
    assert ghosts.estimates()[""] == (2 * num_tokens, 0, {"device": [0, 0, 0]})
