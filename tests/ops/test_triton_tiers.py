"""The GPU's hot buffers over a host tier do what the other backends' do: see `test_tiers`."""

from __future__ import annotations

import pytest

from forebay.ops.interface import Ops
from tests.ops import test_tiers
from tests.ops.test_triton import device, ops
from tests.ops.tiers import PAGE, TierCase, random_steps

__all__ = ["device", "ops"]  # fixtures

SAME = [
    test_tiers.test_swap_in_position_of_several_queries_is_loaded_once,
    test_tiers.test_swap_in_without_a_free_column_reads_the_host_tier,
    test_tiers.test_swap_in_newest_tokens_are_read_where_they_were_bound,
    test_tiers.test_swap_in_rejected_draft_token_is_bound_again_before_it_is_read,
    test_tiers.test_swap_in_prompt_reads_resident_copies_and_else_the_host_tier,
    test_tiers.test_swap_in_padding_row_touches_nothing,
    test_tiers.test_swap_in_of_nothing,
]


@pytest.mark.parametrize("of", [{}, {"int8": True}, {"has_values": True}], ids=["float32", "int8", "values"])
def test_swap_in_of_a_gpu_equals_a_dictionary(ops: Ops, of: dict[str, bool]) -> None:
    """C23"""
    top_k, num_columns = test_tiers.TOP_K, test_tiers.TOP_K + 2 * len(of)
    case = TierCase(ops, num_columns, **of)
    random_steps(case, 17 * num_columns + len(of), 8, top_k=top_k, most_tokens=PAGE)
    assert 0 < case.counts[1] < case.counts[0], "every token was loaded, or none"


@pytest.mark.parametrize("same", SAME, ids=lambda test: test.__name__.removeprefix("test_swap_in_"))
def test_swap_in_of_a_gpu_does_what_other_backends_do(ops: Ops, same: object) -> None:
    """C23"""
    assert callable(same)
    same(ops)
