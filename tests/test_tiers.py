"""Which cases of a test the short tier runs."""

from __future__ import annotations

import pytest

from tests.tiers import sample

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
