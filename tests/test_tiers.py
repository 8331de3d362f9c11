"""Which cases of a test the short tier runs."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.mutants import MUTANTS
from tests.pairs import most_pairs
from tests.tiers import _named, sample, thin

NAMES = [f"tests/test_x.py::test_y[{size}-{kind}]" for size in range(6) for kind in "abc"]


def test_sample_is_the_same_in_any_order_and_loses_one_name_at_most_to_a_new_one() -> None:
    kept = sample(NAMES, 5)
    assert len(kept) == 5
    assert sample(NAMES[::-1], 5) == kept
    for i in range(20):
        assert len(kept - sample([*NAMES, f"tests/test_x.py::test_y[new-{i}]"], 5)) <= 1


@pytest.mark.parametrize("most", [18, 40])
def test_sample_of_few_names_is_all_of_them(most: int) -> None:
    assert sample(NAMES, most) == {*NAMES}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", range(8))
def test_cases_that_the_short_tier_leaves_out_are_slow(case: int, request: pytest.FixtureRequest) -> None:
    names = [f"tests/test_tiers.py::{request.function.__name__}[{i}]" for i in range(8)]
    chosen = request.node.nodeid in sample(names, 2)
    alone = len({item.nodeid for item in request.session.items} & {*names}) == 1
    assert alone or bool(request.node.get_closest_marker("slow")) != chosen


def metafunc(calls: list[SimpleNamespace], test: SimpleNamespace, selection: str) -> pytest.Metafunc:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=selection))
    return cast("pytest.Metafunc", SimpleNamespace(_calls=calls, definition=test, config=config))


@pytest.mark.parametrize(("selection", "num_items"), [("not slow", 2), ("", 6)])
def test_thin_makes_items_of_slow_cases_in_the_long_tier_alone(selection: str, num_items: int) -> None:
    calls = [SimpleNamespace(id=str(i), params={"i": i}, marks=[pytest.mark.slow.mark][: i < 1]) for i in range(6)]
    mark = pytest.mark.quick(2).mark
    test = SimpleNamespace(nodeid="test_x", own_markers=[mark], get_closest_marker={"quick": mark}.get)
    thin(metafunc(calls, test, selection), has_gpu=False)
    quick = [f"test_x[{call.id}]" for call in calls if not call.marks]
    assert {*quick} == sample([f"test_x[{i}]" for i in range(1, 6)], 2)
    assert len(calls) == num_items


@pytest.mark.parametrize(
    ("selection", "has_gpu", "kept"), [("not slow", False, "02"), ("not slow", True, "012"), ("", False, "012")]
)
def test_thin_makes_items_of_cases_for_a_gpu_where_one_is_or_in_the_long_tier(
    selection: str, has_gpu: bool, kept: str
) -> None:
    calls = [SimpleNamespace(id=str(i), params={"i": i}, marks=[pytest.mark.gpu.mark][: i % 2]) for i in range(3)]
    test = SimpleNamespace(nodeid="test_x", own_markers=[], get_closest_marker={}.get)
    thin(metafunc(calls, test, selection), has_gpu=has_gpu)
    assert [call.id for call in calls] == [*kept]


@pytest.mark.parametrize(("own", "num_kept"), [(False, 6), (True, 10)])
def test_thin_with_the_mark_of_a_file_keeps_pairs_if_they_are_fewer(own: bool, num_kept: int) -> None:
    rows = [{"first": a, "second": b, "third": c} for a, b, c in product("xyz", "pq", "mn")]
    calls = [SimpleNamespace(id=str(i), params=row, marks=[]) for i, row in enumerate(rows)]
    mark = pytest.mark.quick(10).mark
    test = SimpleNamespace(nodeid="test_x", own_markers=[mark][: int(own)], get_closest_marker={"quick": mark}.get)
    thin(metafunc(calls, test, "not slow"), has_gpu=False)
    assert len(calls) == num_kept


@pytest.mark.parametrize(
    ("file", "marks", "num_kept"),
    [("tests/ops/test_x.py", [], 3), ("tests/ops/test_x.py", ["whole"], 20), ("tests/test_x.py", [], 20),
     ("tests/docs/test_x.py", [], 20), ("tests/ops/test_named.py", [], 20), ("tests/ops/test_cases.py", [], 4)],
)  # fmt: skip
def test_thin_of_a_test_without_a_number_keeps_three_cases_or_each_that_counts(
    file: str, marks: list[str], num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [SimpleNamespace(id=str(i), params={"i": i}, marks=[]) for i in range(20)]
    left_out = next(i for i in range(20) if f"{file}::test_y[{i}]" not in sample(ids(file), 3))
    named = frozenset({"tests/ops/test_named.py::test_y", f"tests/ops/test_cases.py::test_y[{left_out}]"})
    monkeypatch.setattr("tests.tiers._named", lambda: named)
    marked = {name: getattr(pytest.mark, name).mark for name in marks}
    test = SimpleNamespace(nodeid=f"{file}::test_y", own_markers=[], get_closest_marker=marked.get)
    thin(metafunc(calls, test, "not slow"), has_gpu=False)
    assert len(calls) == num_kept


@pytest.mark.parametrize(
    ("file", "marks", "num_kept"),
    [("tests/ops/test_x.py", [], 9), ("tests/server/test_x.py", [], 3), ("tests/server/test_x.py", ["whole"], 9)],
)
def test_thin_of_a_product_of_three_keeps_all_pairs_of_kernels_and_first_pairs_of_others(
    file: str, marks: list[str], num_kept: int
) -> None:
    rows = [{"first": a, "second": b, "third": c} for a, b, c in product("xyz", "pqr", "mn")]
    calls = [SimpleNamespace(id=str(i), params=row, marks=[]) for i, row in enumerate(rows)]
    marked = {name: getattr(pytest.mark, name).mark for name in marks}
    test = SimpleNamespace(nodeid=f"{file}::test_y", own_markers=[], get_closest_marker=marked.get)
    thin(metafunc(calls, test, "not slow"), has_gpu=False)
    assert len(calls) == num_kept
    assert {call.params["first"] for call in calls} == {*"xyz"}


def ids(file: str) -> list[str]:
    return [f"{file}::test_y[{i}]" for i in range(20)]


def test_tests_that_mutants_name_are_known() -> None:
    assert f"tests/{MUTANTS[0].test}" in _named()


def test_most_pairs_of_product_keeps_every_pair_in_few_rows() -> None:
    options = {
        "isa": ["a", "b", "c"],
        "dtype": [torch.float32, torch.bfloat16],
        "shape": [*range(300, 308)],
        "x": [{}, []],
    }
    rows = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    kept = [rows[i] for i in most_pairs(rows)]
    assert len(kept) == 3 * 8  # of 96
    for a, b in combinations(options, 2):
        assert {(id(row[a]), id(row[b])) for row in kept} == {(id(x), id(y)) for x in options[a] for y in options[b]}


def test_most_pairs_of_listed_cases_keeps_each() -> None:
    rows = [{"name": name, "size": size, "isa": isa} for name, size in [("one", 1001), ("two", 1002)] for isa in "ab"]
    assert sorted(most_pairs(rows)) == [0, 1, 2, 3]
    assert most_pairs([{"size": 1}, {"size": 2}, {"size": 1}]) == [0, 1]


@pytest.mark.parametrize("third", "pqrs")
@pytest.mark.parametrize("second", "xyz")
@pytest.mark.parametrize("first", "ab")
def test_product_of_three_parameters_is_run_by_pairs(
    first: str, second: str, third: str, request: pytest.FixtureRequest
) -> None:
    name = request.node.nodeid.partition("[")[0]
    cases = [item for item in request.session.items if item.nodeid.partition("[")[0] == name]
    short = [item.callspec.params for item in cases if not item.get_closest_marker("slow")]
    if len(cases) == 24:  # the long tier, whose product is whole
        assert len(short) < 16
    if len(cases) >= 12:
        assert {(row["second"], row["third"]) for row in short} == {*product("xyz", "pqrs")}
