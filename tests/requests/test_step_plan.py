"""Plans are values: they compare by their bytes, nobody writes to them, and they arrive as what was sent."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.base.parts import Part, paths_of
from forebay.memory.slots import NO_IDS
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, HostCopy, HostWork, StepPlan
from tests.plans import EMPTY_KINDS, EMPTY_PARTS, changed, column

INTS = st.integers(-(2**63), 2**63 - 1)


def arrays(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype == np.bool_:
        values: st.SearchStrategy[Any] = st.booleans()
    else:
        info = np.iinfo(dtype)
        values = st.integers(info.min, info.max)
    return st.lists(values, max_size=5).map(lambda some: np.array(some, dtype=dtype))


def parts(part: type[Part], **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    columns = {name: arrays(column.dtype) for name, column in part.columns.items()}
    return st.builds(part, **columns, **others)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    seed=st.integers(-1, 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)
ADMISSIONS = parts(Admission, row=INTS, request_id=INTS, params=PARAMS, num_prompt=INTS)
SLOTS = st.dictionaries(st.sampled_from(["kv", "window", "state"]), arrays(np.dtype(np.int64)))
COPIES = st.lists(st.builds(HostCopy, request_id=INTS, slots=SLOTS), max_size=2).map(tuple)
IDS = st.lists(INTS, max_size=3).map(tuple)
INNER: dict[str, st.SearchStrategy[Any]] = {
    name: parts(type(part)) for name, part in EMPTY_PARTS.items() if not isinstance(part, HostWork)
}
INNER["host"] = st.builds(HostWork, saves=COPIES, drops=IDS, loads=COPIES)
PLANS = parts(
    StepPlan,
    step=INTS,
    num_extends=INTS,
    admissions=st.lists(ADMISSIONS, max_size=2).map(tuple),
    prompt_logprobs=IDS,
    **INNER,
)


PLAN = StepPlan(
    step=1,
    num_extends=0,
    rows=NO_IDS,
    q_lens=NO_IDS,
    starts=NO_IDS,
    input_ids=NO_IDS,
    sample_mask=np.empty(0, dtype=np.bool_),
)


@settings(max_examples=60)
@given(plan=PLANS)
def test_a_plan_that_was_sent_arrives_as_it_was(plan):
    arrived = StepPlan.decode(plan.encode())
    assert arrived == plan
    assert arrived.admissions == plan.admissions
    for path in paths_of(StepPlan):
        name = path.rpartition(".")[2]
        sent, got = column(plan, name), column(arrived, name)
        assert (got.dtype, got.tolist()) == (sent.dtype, sent.tolist())


@settings(max_examples=40)
@given(plan=PLANS, name=st.sampled_from([path.rpartition(".")[2] for path in paths_of(StepPlan)]), data=st.data())
def test_plans_that_differ_in_one_column_are_not_equal(plan, name, data):
    old = column(plan, name)
    new = data.draw(arrays(old.dtype))
    assert (changed(plan, **{name: new}) == plan) == (new.tolist() == old.tolist())


@settings(max_examples=20)
@given(plan=PLANS)
def test_nobody_writes_to_a_plan_not_even_to_one_that_arrived(plan):
    for some in (plan, StepPlan.decode(plan.encode())):
        for path in paths_of(StepPlan):
            with pytest.raises(ValueError, match="read-only"):
                column(some, path.rpartition(".")[2])[...] = 0
        with pytest.raises(AttributeError, match="immutable"):
            some.rows = NO_IDS


def test_names_of_columns_are_a_plans_only_ones():
    """A column has one name, from the plan to the device."""
    names = [name for part in (StepPlan, *map(type, (EMPTY_PARTS | EMPTY_KINDS).values())) for name in part.columns]
    assert len(set(names)) == len(names) == len(paths_of(StepPlan))


def test_a_column_of_another_type_is_refused_at_once():
    with pytest.raises(TypeError, match=r"StateWork\.clears is int32, not int64"):
        changed(PLAN, clears=np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x93\x01\x02\x03", b"\xc1"])
def test_what_is_no_plan_is_not_decoded(data):
    with pytest.raises(msgspec.DecodeError):
        StepPlan.decode(data)


def test_what_no_part_holds_is_not_sent_either():
    plan = changed(PLAN, drops=(np.datetime64("2026-01-01"),))
    with pytest.raises(TypeError, match="a part holds a datetime64"):
        plan.encode()


def test_padding_has_the_columns_with_pads_of_the_lengths_that_are_asked_for():
    padding = StepPlan.padding({"S": 2})
    assert {name: values.tolist() for name, values in padding.items()} == {"rows": [0, 0]}
