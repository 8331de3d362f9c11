"""C5, C14, C28, C31: tests of equal bits of the CPU's kernels, asked of a GPU's by the same bodies; see `test_triton`.

What else is asked of equal bits has tests of its own in `test_triton_any_batch` and the files that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch

from forebay.ops import Ops
from tests.ops import (
    test_activations,
    test_attention,
    test_compression,
    test_elementwise,
    test_kv,
    test_linear,
    test_recurrence,
    test_rowwise,
    test_selection,
)
from tests.ops.test_triton import device, ops
from tests.ops.triton_device import attention

__all__ = ["device", "ops"]  # fixtures

SEGMENT: Final = 64  # keys: the fewest that a program adds up
FEW: Final = {"seq_lens": [1, 40, 21, 70], "query_lens": [1, 40, 5, 1]}
PREFIX: Final = {
    "seq_lens": [70, 100, 140, 20, 80],
    "query_lens": [1, 1, 1, 1, 9],
    "shares": ((1, 0, 48), (2, 0, 48), (4, 0, 48), (2, 1, 96)),
}
F32: Final = torch.float32


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pages and segments in a few tokens."""
    monkeypatch.setattr(attention, "_segment", lambda *shape: SEGMENT)
    monkeypatch.setattr(test_attention, "RAGGED", FEW)
    monkeypatch.setattr(test_attention, "SHARED", PREFIX)
    monkeypatch.setattr(test_selection, "EVERY", FEW)


def both(ops: Ops) -> dict[str, Any]:
    """The kernels in place of those of the CPU, with any number of threads."""
    return {"native": ops, "single_threaded": ops}


OF_ATTENTION: Final[Mapping[str, Callable[[Ops], None]]] = {
    "slots of others": lambda ops: test_attention.test_padding_and_foreign_slots_never_influence_a_live_row_c5(
        ops, F32, 20
    ),
    "tokens before the window": lambda ops: test_attention.test_what_has_left_the_window_never_influences_a_live_row(
        ops, F32
    ),
    "other sequences": lambda ops: test_attention.test_a_sequence_does_not_depend_on_the_batch_around_it(ops, F32, 0),
    "page sizes": lambda ops: test_attention.test_attention_does_not_depend_on_the_page_size(ops, F32, 0),
    "page maps": lambda ops: test_attention.test_a_page_map_leads_to_the_pages_of_the_cache(ops, F32, 16),
    "shared prefixes": lambda ops: test_attention.test_sequences_that_share_a_prefix_have_the_bits_that_they_have_alone(
        ops, Ops(1), F32, 16, 2
    ),
    "all tokens selected": lambda ops: test_selection.test_attention_over_all_tokens_has_the_bits_of_dense_attention(
        ops, F32, int8=False
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("of", OF_ATTENTION.values(), ids=OF_ATTENTION)
def test_c31_attention_has_the_same_bits_as_the_cpu_s_contracts_ask(ops: Ops, of: Callable[[Ops], None]) -> None:
    of(ops)


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_attention.KINDS.values(), ids=test_attention.KINDS)
def test_c5_slots_of_others_change_no_bit_of_any_kind_of_attention(ops: Ops, kind: dict[str, Any]) -> None:
    test_attention.test_foreign_slots_never_influence_a_live_row_of_any_kind_c5(ops, F32, kind)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", test_activations.GATED)
def test_c31_activations_depend_neither_on_other_rows_nor_on_the_place_in_a_row(ops: Ops, name: str) -> None:
    activation = test_activations.GATED[name]
    test_activations.test_activations_depend_neither_on_other_rows_nor_threads_nor_the_place_in_a_row(
        **both(ops), dtype=F32, activation=activation
    )
    test_activations.test_activations_of_views_into_wider_rows(ops, F32, activation)


OF_ROWS: Final[Mapping[str, Callable[[Ops], None]]] = {
    "sums": lambda ops: test_elementwise.test_rows_and_threads_do_not_matter(**both(ops), dtype=F32),
    "gated norms": lambda ops: test_activations.test_gated_rms_norm_depends_neither_on_other_rows_nor_threads(
        **both(ops), dtype=F32
    ),
    "norms": lambda ops: test_rowwise.test_rowwise_ops_do_not_depend_on_the_other_rows_or_threads(
        **both(ops), dtype=F32
    ),
    "norms of heads": lambda ops: test_rowwise.test_layer_norm_of_heads_with_weights_of_their_own(
        ops, Ops(1), F32, biased=True
    ),
    "gates of delta rules": lambda ops: test_recurrence.test_delta_gates_depend_neither_on_other_rows_nor_threads(
        **both(ops), dtypes=(F32, F32)
    ),
    "a row of NaN": lambda ops: test_linear.test_a_row_of_nan_stays_a_row_of_nan(ops, F32),
    "rope with the KV cache": lambda ops: test_kv.test_rope_and_store_kv_has_the_bits_of_one_after_the_other(
        ops, F32, 5, 10
    ),
    "rope of equal positions": lambda ops: test_kv.test_rope_of_equal_positions_has_the_bits_of_one_position(
        ops, F32, test_kv.AXES
    ),
    "states before the first block": lambda ops: test_compression.test_states_that_do_not_exist_may_be_anything(
        ops, Ops(1)
    ),
}

LONG: Final = ("gated norms", "norms", "rope of equal positions", "states before the first block")


@pytest.mark.parametrize(
    "of", [pytest.param(of, id=name, marks=[pytest.mark.slow][: name in LONG]) for name, of in OF_ROWS.items()]
)
def test_c31_rows_have_the_same_bits_as_the_cpu_s_contracts_ask(ops: Ops, of: Callable[[Ops], None]) -> None:
    of(ops)
