"""A-2: an index outside its pool, -1 above all, raises before it becomes an address."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from forebay.config.engine_config import CacheTypes
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import RecurrentState
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, HostCopy, StepPlan
from forebay.runtime.host.bounds import IndexOutOfPool, PoolBounds
from forebay.runtime.kinds.state import RecurrentStates
from tests.plans import changed, column, plan_of
from tests.runtime.plans import ids

PLAIN = PoolBounds(
    num_rows=3, pages_per_row=2, page_size=4, vocab_size=97, num_slots={"kv": 5, "window": 1, "state": 1, "resident": 1}
)
HYBRID = replace(PLAIN, num_slots={"kv": 5, "window": 4, "state": 9, "resident": 1})
CACHE = CachePool(
    [RecurrentState(conv=(2, 2), ssm=(2, 2))], CacheTypes(), page_size=4, num_slots={"state": 8}, device="cpu"
)
STATES = RecurrentStates(CACHE, Ops(1), torch.arange(4, dtype=torch.int32))

PLAN = plan_of(
    step=1,
    num_extends=1,
    rows=ids([1, 2]),
    q_lens=ids([2, 1]),
    starts=ids([6]),
    input_ids=ids([0, 96]),
    sample_mask=np.array([True, True]),
    write_rows=ids([2]),
    write_columns=ids([1]),
    write_pages=ids([4]),
)
HYBRID_PLAN = changed(
    PLAN,
    map_pages=ids([1, 4]),
    map_windows=ids([0, 3]),
    state_slots=ids([1, 8]),
    snap_seqs=ids([0, 0, 1]),
    snap_lens=ids([7, 8, 3]),
    snap_slots=ids([2, 3, 4]),
    clears=ids([5, 6]),
    copy_src=ids([4, 4]),
    copy_dst=ids([1, 7]),
)
LARGEST = {
    "rows": 2,
    "starts": 6,
    "input_ids": 96,
    "write_rows": 2,
    "write_columns": 1,
    "write_pages": 4,
}
LARGEST_HYBRID = {
    "map_pages": 4,
    "map_windows": 3,
    "state_slots": 8,
    "snap_seqs": 1,
    "snap_slots": 8,
    "clears": 8,
    "copy_src": 8,
    "copy_dst": 8,
}


def with_last(plan: StepPlan, field: str, value: int) -> StepPlan:
    values = column(plan, field).copy()
    values[-1] = value
    return changed(plan, **{field: values})


def test_a_plan_inside_its_pools_passes_and_so_does_one_without_what_is_optional():
    PLAIN.check(PLAN)
    PLAIN.check(changed(PLAN, write_rows=ids([]), write_columns=ids([]), write_pages=ids([])))
    HYBRID.check(HYBRID_PLAN)
    HYBRID.check(changed(PLAN, state_slots=ids([0, 0])))


@pytest.mark.parametrize("field", LARGEST)
@pytest.mark.parametrize("beyond", [-1, 1, 2**31, -(2**31)])
def test_every_index_of_a_plan_is_checked_at_both_ends(field, beyond):
    with pytest.raises(IndexOutOfPool, match=field):
        PLAIN.check(with_last(PLAN, field, beyond if beyond < 0 else LARGEST[field] + beyond))


@pytest.mark.parametrize("field", LARGEST_HYBRID)
@pytest.mark.parametrize("beyond", [-1, 1, 2**31, -(2**31)])
def test_every_index_of_states_and_windows_is_checked_at_both_ends(field, beyond):
    with pytest.raises(IndexOutOfPool, match=field):
        HYBRID.check(with_last(HYBRID_PLAN, field, beyond if beyond < 0 else LARGEST_HYBRID[field] + beyond))


@pytest.mark.parametrize("field", ["map_pages", "snap_slots", "clears", "copy_src", "copy_dst"])
def test_padding_is_not_written_by_name(field):
    """C14"""
    with pytest.raises(IndexOutOfPool, match=field):
        HYBRID.check(with_last(HYBRID_PLAN, field, 0))


@pytest.mark.parametrize(
    ("field", "slot"),
    [
        ("state_slots", 1),  # two sequences with one live state
        ("snap_slots", 1),  # a snapshot onto a live state
        ("snap_slots", 2),
        ("clears", 5),
        ("copy_dst", 1),
        ("copy_dst", 4),  # source and destination at once
        ("copy_dst", 5),  # cleared and copied to
        ("clears", 4),  # cleared before it is copied
    ],
)
def test_a_state_slot_that_is_written_twice_or_read_too_late_is_refused(field, slot):
    with pytest.raises(IndexOutOfPool, match="more than once"):
        STATES.check(with_last(HYBRID_PLAN, field, slot))


def test_many_padded_sequences_may_name_slot_zero_and_one_source_many_destinations():
    STATES.check(HYBRID_PLAN)
    STATES.check(changed(HYBRID_PLAN, state_slots=ids([0, 0])))


@pytest.mark.parametrize("lens", [[6, 8, 3], [7, 9, 3], [8, 7, 3], [7, 7, 3]])
def test_snapshots_lie_inside_what_the_step_computes_and_in_order(lens):
    with pytest.raises(IndexOutOfPool, match="snap_lens"):
        STATES.check(changed(HYBRID_PLAN, snap_lens=ids(lens)))


@pytest.mark.parametrize("count", [0, 1])
def test_a_column_that_the_model_reads_must_be_whole(count):
    with pytest.raises(IndexOutOfPool, match="state_slots"):
        HYBRID.check(changed(HYBRID_PLAN, state_slots=ids([1] * count)))


@pytest.mark.parametrize("field", ["q_lens", "write_columns", "map_windows", "snap_lens", "copy_dst"])
def test_columns_of_one_length_are_equally_long(field):
    with pytest.raises(IndexOutOfPool, match=f"{field} of a plan has 0 entries"):
        HYBRID.check(changed(HYBRID_PLAN, **{field: ids([])}))


def test_a_plan_names_nothing_that_the_model_does_not_have():
    with pytest.raises(IndexOutOfPool, match="state_slots"):
        PLAIN.check(changed(PLAN, state_slots=ids([0, 0])))


@pytest.mark.parametrize(
    ("starts", "lens", "said"),
    [
        ([-1], [1], "span_starts"),
        ([2], [1], "span_starts"),  # a decode's
        ([0], [0], "span_lens"),
        ([1], [-1], "span_lens"),
        ([0], [1 << 62], "span_lens"),
        ([1], [2], "end at .3.; the sequences that they begin in end at .2."),
        ([0], [], "0 entries, not 1"),
    ],
)
def test_c13_spans_of_a_plan_lie_inside_its_prompts(starts, lens, said):
    PLAIN.check(changed(PLAN, span_starts=ids([0]), span_lens=ids([2])))
    with pytest.raises(IndexOutOfPool, match=said):
        PLAIN.check(changed(PLAN, span_starts=ids(starts), span_lens=ids(lens)))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"q_lens": [2, 2]}, "q_lens"),  # a decode beside a prompt has one token
        ({"q_lens": [2, 0]}, "q_lens"),
        ({"q_lens": [3, 1]}, "extends of"),
        ({"q_lens": [0, 1], "input_ids": []}, "q_lens"),
        ({"starts": []}, "0 starts"),
        ({"drafts": [5]}, "drafts"),
    ],
)
def test_a_plan_has_the_tokens_that_its_sequences_compute(columns, said):
    with pytest.raises(IndexOutOfPool, match=said):
        PLAIN.check(changed(PLAN, **{name: ids(values) for name, values in columns.items()}))


def test_a_decode_is_no_wider_than_the_rows_have_room_for_drafts():
    decodes = plan_of(
        step=1,
        num_extends=0,
        rows=ids([1, 2]),
        q_lens=ids([3, 1]),
        starts=ids([]),
        input_ids=ids([]),
        sample_mask=np.array([True, True]),
        drafts=ids([5, 6]),
    )
    wide = replace(PLAIN, width=3)
    wide.check(decodes)
    wide.check(changed(decodes, drafts=ids([])))  # they are on the device
    for columns, said in (({"q_lens": [4, 1]}, "q_lens"), ({"drafts": [5]}, "drafts"), ({"drafts": [5, 97]}, "drafts")):
        with pytest.raises(IndexOutOfPool, match=said):
            wide.check(changed(decodes, **{name: ids(values) for name, values in columns.items()}))


def test_a_decode_has_one_snapshot_at_most_and_it_may_be_beyond_the_step():
    STATES.check(changed(HYBRID_PLAN, snap_lens=ids([7, 8, 99])))
    with pytest.raises(IndexOutOfPool, match="one snapshot at most"):
        STATES.check(changed(HYBRID_PLAN, snap_seqs=ids([0, 1, 1]), snap_lens=ids([7, 2, 3])))


@pytest.mark.parametrize("field", ["saves", "loads"])
@pytest.mark.parametrize(
    ("kind", "wrong"), [("kv", 0), ("kv", 5), ("window", 0), ("window", 4), ("state", 9), ("x", 1)]
)
def test_slots_of_host_copies_are_checked(field, kind, wrong):
    slots = {"kv": ids([1, 4]), "window": ids([1, 3]), "state": ids([8])}
    HYBRID.check(changed(HYBRID_PLAN, **{field: (HostCopy(request_id=3, slots=slots),)}))
    copy = HostCopy(request_id=3, slots=slots | {kind: ids([1, wrong])})
    with pytest.raises(IndexOutOfPool, match=f"{kind} slots of a copy"):
        HYBRID.check(changed(HYBRID_PLAN, **{field: (copy,)}))


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_rope_positions_are_three_of_each_prompt_token(count: int) -> None:
    with pytest.raises(IndexOutOfPool, match=f"{count} rope_positions for 2 tokens of prompts"):
        PLAIN.check(changed(PLAN, rope_positions=ids([0] * count)))


@pytest.mark.parametrize("wrong", [-1, 8])
def test_rope_positions_are_positions_of_a_row(wrong: int) -> None:
    PLAIN.check(changed(PLAN, rope_positions=ids([0, 7, 0, 7, 0, 7])))
    with pytest.raises(IndexOutOfPool, match="rope_positions of a plan lie in"):
        PLAIN.check(changed(PLAN, rope_positions=ids([0, 1, 2, 3, 4, wrong])))


@pytest.mark.parametrize("wrong", [1, -8])
def test_a_rope_delta_leaves_positions_in_the_row(wrong: int) -> None:
    admission = Admission(
        row=1, request_id=1, params=SamplingParams(), token_ids=np.zeros(1, dtype=np.int32), num_prompt=1
    )
    PLAIN.check(changed(PLAN, admissions=(msgspec.structs.replace(admission, rope_delta=-7),)))
    with pytest.raises(IndexOutOfPool, match="rope_delta"):
        PLAIN.check(changed(PLAN, admissions=(msgspec.structs.replace(admission, rope_delta=wrong),)))
