"""Adapters under random traffic, faults and sleep, and whether mistakes would be found there (C8, C19)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from forebay.engine.lifecycle.adapters import AdapterLoader
from forebay.memory.adapters import AdapterLoad, Adapters
from forebay.memory.holding import Holding
from forebay.requests.request import Request
from forebay.requests.transfers import NO_ADAPTER, AdapterIdentity
from forebay.scheduler import decode_role, prefill_role
from forebay.scheduler.memory.deferred import Deferred
from tests.simulation import adapting_pair
from tests.simulation.adapting import run_seeds

SEEDS = (2, 4, 6, 10, 53, 86)  # each mutant that names the test fails with one of them; in 53 an adapter is lost


@pytest.mark.long
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(800), marks=pytest.mark.slow)])
def test_adapters_random_traffic_each_request_computes_with_the_adapter_that_it_named(seeds: Iterable[int]) -> None:
    outcome = run_seeds(seeds)
    assert min(outcome.loads, outcome.refused, outcome.unloads, outcome.lost, outcome.adapted) > 0


def share_all(req: Request, weight_version: int) -> None:
    req.weight_version, req.cache_namespace = weight_version, f"{weight_version}/{req.namespace}"


def free_at_once(deferred: Deferred, holding: Holding, number: int) -> None:
    holding.kind.return_slots(holding, number)


def count_nobody(adapters: Adapters, adapter: AdapterLoad | None) -> None: ...


def keep_the_slot(adapters: Adapters, adapter: AdapterLoad) -> None:
    del adapters._loading[adapter.name]


def read_nothing(loader: AdapterLoader, progress: Callable[[], None]) -> None: ...


def begin_with_one_number(adapters: Adapters, name: str, path: str, *, replace: bool = False) -> AdapterLoad:
    adapters._last_number = 0
    return BEGIN(adapters, name, path, replace=replace)


BEGIN = Adapters.begin


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (Request, "compute_with", share_all),
        (Deferred, "free_holding", free_at_once),
        (Adapters, "enter", count_nobody),
        (Adapters, "failed", keep_the_slot),
        (AdapterLoader, "read_again", read_nothing),
        (Adapters, "begin", begin_with_one_number),
    ],
    ids=["one namespace", "no fence", "users not counted", "failed load", "empty after a sleep", "numbers again"],
)
def test_a_mistake_about_adapters_is_found(
    owner: type[object], name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(Exception):  # noqa: B017
        run_seeds(range(120))


@pytest.mark.parametrize("seeds", [range(4, 8), pytest.param(range(8, 404), marks=pytest.mark.slow)])
def test_c22_adapters_of_two_engines_both_halves_compute_with_one_or_end_typed(seeds: range) -> None:
    outcome = adapting_pair.run_seeds(seeds)
    assert min(outcome.moved, outcome.unknown, outcome.mismatched, outcome.loads, outcome.unloads) > 0


def test_c22_windows_that_two_open_tickets_hold_are_nobody_s_and_no_chunk_finds_too_few() -> None:
    adapting_pair.run_seed(972386)


def nothing(req: Request) -> object:
    return NO_ADAPTER


class Whatever:
    """Equals every adapter."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def anything(req: Request) -> object:
    return Whatever()


class Named(Whatever):
    """Equals every adapter of its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterIdentity) and other.name == self.name


def by_name(req: Request) -> object:
    return Named(req.adapter.name if req.adapter else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "mistake"),
    [(decode_role, nothing), (prefill_role, anything), (prefill_role, by_name)],
    ids=["missing from the offer", "not compared", "digests not compared"],
)
def test_a_mistake_about_adapters_of_two_engines_is_found(
    owner: object, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "adapter_of", mistake)
    with pytest.raises(Exception):  # noqa: B017
        adapting_pair.run_seeds(range(60))
