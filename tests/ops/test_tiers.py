"""Hot buffers over a host tier, against a dictionary: what is read, what is loaded, which column is replaced (C23)."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from tests.ops.tiers import PAGE, TierCase, random_steps

TOP_K = 5


@pytest.mark.parametrize("of", [{}, {"int8": True}, {"has_values": True}], ids=["float32", "int8", "values"])
@pytest.mark.parametrize("num_columns", [TOP_K, TOP_K + 2, 2 * TOP_K])
def test_swap_in_random_steps_equal_a_dictionary(each_ops: Ops, num_columns: int, of: dict[str, bool]) -> None:
    case = TierCase(each_ops, num_columns, **of)
    random_steps(case, 17 * num_columns + len(of), 60, top_k=TOP_K, most_tokens=PAGE)
    assert 0 < case.counts[1] < case.counts[0], "every token was loaded, or none"


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [TOP_K, TOP_K + 1, 2 * TOP_K, 4 * TOP_K])
def test_swap_in_many_random_steps_equal_a_dictionary(each_ops: Ops, num_columns: int) -> None:
    for seed in range(25):
        random_steps(TierCase(each_ops, num_columns), seed, 1_000, top_k=TOP_K, most_tokens=PAGE)


def test_swap_in_position_of_several_queries_is_loaded_once(each_ops: Ops) -> None:
    case = TierCase(each_ops, 8)
    case.prompt(1, 20)
    paged, _ = case.step({1: 3})
    case.check(paged, [[2, 3], [2, 3], [3]], 2)
    assert case.counts.tolist() == [5, 2]


def test_swap_in_without_a_free_column_reads_the_host_tier(each_ops: Ops) -> None:
    """Three queries select six tokens; two columns are loaded, and stay as they are within the step."""
    case = TierCase(each_ops, 2)
    case.prompt(1, 20)
    paged, _ = case.step({1: 3})
    found = case.swap_in(paged, [[0, 1], [2, 3], [4, 5]], 2)
    on_host = case.layout.host_base
    assert (found.page_table[0] < on_host).all()
    assert (found.page_table[1:] >= on_host).all()
    assert case.tiers.positions[1].tolist() == [0, 1]


def test_swap_in_newest_tokens_are_read_where_they_were_bound(each_ops: Ops) -> None:
    """A page of them, across its edge; none takes a column."""
    case = TierCase(each_ops, 4)
    case.prompt(1, 6)
    paged, _ = case.step({1: PAGE})
    found = case.swap_in(paged, [[], [], [], [6, 7, 8, 9]], 4)
    base = case.layout.hot_base + case.layout.row_tokens + case.layout.num_columns
    assert found.page_table[3].tolist() == [base + position % PAGE for position in (6, 7, 8, 9)]
    assert case.tiers.positions[1].tolist() == [-1] * 4
    assert case.counts.tolist() == [4, 0]


def test_swap_in_rejected_draft_token_is_bound_again_before_it_is_read(each_ops: Ops) -> None:
    """What the rejected token took the place of is loaded from the host tier."""
    case = TierCase(each_ops, 4)
    case.prompt(1, 1)
    case.step({1: PAGE})
    paged, _ = case.step({1: PAGE})  # positions 5 to 8, over 1 to 4
    case.reject(1, 3)
    paged, _ = case.step({1: 1})
    case.check(paged, [[2, 3, 5, 6]], 4)
    assert case.counts.tolist() == [4, 2]


def test_swap_in_prompt_reads_resident_copies_and_else_the_host_tier(each_ops: Ops) -> None:
    case = TierCase(each_ops, 4)
    case.active[1] = 0
    case.prompt(1, 12, resident=2)
    paged, _ = case.step({1: 1})
    found = case.swap_in(paged, [[0, 5, 8, 12]], 4)
    on_host = case.layout.host_base
    expected = [PAGE, 2 * PAGE + 1, on_host + case.location(1, 8), on_host + case.location(1, 12)]
    assert found.page_table[0].tolist() == expected
    assert case.counts.tolist() == [0, 0]


def test_swap_in_padding_row_touches_nothing(each_ops: Ops) -> None:
    case = TierCase(each_ops, 4)
    case.prompt(1, 9)
    before = case.tiers.kv.k[PAGE:].clone(), case.tiers.positions.clone(), case.newest.clone()
    paged, _ = case.step({0: 1})
    case.lens[0] = 0
    case.swap_in(paged, [[0]], 1)
    after = case.tiers.kv.k[PAGE:], case.tiers.positions, case.newest
    host_page = case.layout.host_base - PAGE  # its own token goes to page 0 of both tiers
    assert torch.equal(before[0][:host_page], after[0][:host_page])
    assert torch.equal(before[0][host_page + PAGE :], after[0][host_page + PAGE :])
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))


def test_swap_in_of_nothing(each_ops: Ops) -> None:
    case = TierCase(each_ops, 4)
    paged, _ = case.step({1: 1, 2: 1})
    found = case.swap_in(paged, [[], []], 3)
    assert found.page_table.tolist() == [[-1] * 3] * 2
    assert case.counts.tolist() == [0, 0]
