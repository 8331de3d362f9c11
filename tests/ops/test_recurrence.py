from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.recurrence import DeltaGates
from tests.ops.helpers import assert_close, assert_same_bits, normal
from tests.ops.recurrences import CASES, Case, Conv, Inputs, cut, joined, state_batch, state_table

pytestmark = pytest.mark.quick(16)

LENS, SLOTS = [3, 0, 1, 17, 1, 40, 1], [5, 2, 0, 1, 4, 7, 0]
SNAPSHOTS = [[(2, 9)], [], [], [(1, 10), (2, 11), (17, 12)], [], [(33, 13)], []]
NUM_SLOTS = 14


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


Dtypes = tuple[torch.dtype, torch.dtype]


@pytest.fixture(
    params=[(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "bfloat16", "bfloat16-states"],
)
def dtypes(request: pytest.FixtureRequest) -> Dtypes:
    """Of inputs and of states."""
    return request.param


@pytest.fixture
def dtype(dtypes: Dtypes) -> torch.dtype:
    return dtypes[0]


@pytest.fixture
def state_dtype(dtypes: Dtypes, case: Case) -> torch.dtype:
    """A convolution's state is in the input's dtype."""
    return dtypes[0] if isinstance(case, Conv) else dtypes[1]


def _sequences(case: Case, dtype: torch.dtype, lens: list[int] = LENS) -> list[Inputs]:
    return [case.inputs(length, dtype, seed=100 * i) for i, length in enumerate(lens)]


def _alone(ops: Ops, case: Case, inputs: Inputs, state: Tensor, *, snapshots: list[tuple[int, int]] = []) -> Tensor:  # noqa: B006
    """One sequence, in slot 1."""
    return case.call(ops, inputs, state, state_batch([len(next(iter(inputs.values())))], [1], [snapshots]))


@pytest.mark.quick(8)
def test_ragged_sequences_equal_the_reference(
    native: NativeOps, reference: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs, batch = joined(_sequences(case, dtype)), state_batch(LENS, SLOTS, SNAPSHOTS)
    ours, theirs = (state_table(case, NUM_SLOTS, state_dtype, seed=7) for _ in range(2))
    out, expected = case.call(native, inputs, ours, batch), case.call(reference, inputs, theirs, batch)
    assert_close(out, expected, state_dtype=state_dtype)
    assert_close(ours, theirs)


def test_steps_without_tokens_leave_states_alone(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    state = state_table(case, NUM_SLOTS, state_dtype, seed=7)
    before = state.clone()
    inputs = case.inputs(0, dtype, seed=0)
    for lens in ([], [0], [0, 0]):
        out = case.call(each_ops, inputs, state, state_batch(lens, SLOTS[: len(lens)]))
        assert len(out) == 0
        assert_same_bits(state, before)


def test_only_the_named_slots_change_and_never_slot_0_c14(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    state = state_table(case, NUM_SLOTS, state_dtype, seed=7)
    before = state.clone()
    snapshots = [[*SNAPSHOTS[0], (3, 0)], *SNAPSHOTS[1:]]
    case.call(each_ops, joined(_sequences(case, dtype)), state, state_batch(LENS, SLOTS, snapshots))
    changed = {i for i in range(NUM_SLOTS) if not torch.equal(state[i], before[i])}
    assert changed == {5, 1, 4, 7, 9, 10, 11, 12, 13}


def test_what_slot_0_holds_reaches_no_other_sequence_c14(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs, batch = joined(_sequences(case, dtype)), state_batch(LENS, SLOTS, SNAPSHOTS)
    live = torch.cat([torch.full((n,), slot > 0) for n, slot in zip(LENS, SLOTS, strict=True)])
    clean, poisoned = (state_table(case, NUM_SLOTS, state_dtype, seed=7) for _ in range(2))
    poisoned[0] = float("nan")
    expected, actual = case.call(each_ops, inputs, clean, batch), case.call(each_ops, inputs, poisoned, batch)
    assert_same_bits(actual[live], expected[live])
    assert_same_bits(poisoned[1:], clean[1:])


def test_decoding_snapshots_go_to_the_slot_named_or_nowhere_c14(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """As a replayed step has it: one entry for each sequence, whose slot is 0 where nothing is tracked. The last two
    are padding. Slot 0 holds NaN: no bit of it reaches a live row, and it stays what it is."""
    slots = [3, 5, 0, 0]
    inputs, table = case.inputs(4, dtype, seed=3), state_table(case, NUM_SLOTS, state_dtype, seed=7)
    plain = table.clone()
    expected = case.call(each_ops, inputs, plain, state_batch([1] * 4, slots))
    for tracked in ([0, 0, 0, 0], [8, 0, 9, 0], [0, 10, 0, 11]):
        poisoned = table.clone()
        poisoned[0] = float("nan")
        batch = state_batch([1] * 4, slots, [[(1, slot)] for slot in tracked])
        out = case.call(each_ops, inputs, poisoned, batch)
        assert_same_bits(out[:2], expected[:2])
        assert poisoned[0].isnan().all()
        assert_same_bits(poisoned[1:6], plain[1:6])
        for slot, kept in zip(slots[:2], tracked[:2], strict=True):
            if kept:
                assert_same_bits(poisoned[kept], plain[slot])
        untouched = [i for i in range(6, NUM_SLOTS) if i not in tracked]
        assert_same_bits(poisoned[untouched], table[untouched])


def test_a_sequence_does_not_depend_on_the_batch_around_it(
    native: NativeOps, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    sequences = _sequences(case, dtype)
    table = state_table(case, NUM_SLOTS, state_dtype, seed=7)
    together_state = table.clone()
    together = case.call(native, joined(sequences), together_state, state_batch(LENS, SLOTS, SNAPSHOTS))
    for inputs, slot, expected in zip(sequences, SLOTS, together.split(LENS), strict=True):
        state = table[[0, slot]].clone()
        assert_same_bits(_alone(native, case, inputs, state), expected)
        if slot:
            assert_same_bits(state[1], together_state[slot])


def test_chunks_and_decoding_give_the_same_bits_as_prefill_at_once(
    native: NativeOps, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs, table = case.inputs(40, dtype, seed=3), state_table(case, 2, state_dtype, seed=7)
    at_once_state = table.clone()
    at_once = _alone(native, case, inputs, at_once_state)
    for chunk in (1, 3, 16):
        state = table.clone()
        pieces = [_alone(native, case, cut(inputs, a, min(a + chunk, 40)), state) for a in range(0, 40, chunk)]
        assert_same_bits(torch.cat(pieces), at_once)
        assert_same_bits(state, at_once_state)


@pytest.mark.quick(8)
def test_the_references_chunks_are_close_to_prefill_at_once(
    case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    reference = Ops(1)
    inputs, table = case.inputs(40, dtype, seed=3), state_table(case, 2, state_dtype, seed=7)
    at_once_state, state = table.clone(), table.clone()
    at_once = _alone(reference, case, inputs, at_once_state)
    pieces = [_alone(reference, case, cut(inputs, a, b), state) for a, b in ((0, 1), (1, 20), (20, 40))]
    assert_close(torch.cat(pieces), at_once, state_dtype=state_dtype)
    assert_close(state, at_once_state)


def test_a_snapshot_is_the_state_of_a_step_that_ended_there(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    same = assert_close if each_ops.name == "torch" else assert_same_bits  # torch's exp is another at a row's end
    inputs, table = case.inputs(9, dtype, seed=3), state_table(case, 6, state_dtype, seed=7)
    state, plain = table.clone(), table.clone()
    out = _alone(each_ops, case, inputs, state, snapshots=[(1, 2), (2, 3), (6, 4), (9, 5)])
    assert_same_bits(_alone(each_ops, case, inputs, plain), out)
    assert_same_bits(state[1], plain[1])
    assert_same_bits(state[5], state[1])
    for length, slot in ((1, 2), (2, 3), (6, 4)):
        shorter = table.clone()
        _alone(each_ops, case, cut(inputs, 0, length), shorter)
        same(state[slot], shorter[1])


def test_recurrences_do_not_depend_on_the_number_of_threads(
    native: NativeOps, single_threaded: NativeOps, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs, batch = joined(_sequences(case, dtype)), state_batch(LENS, SLOTS, SNAPSHOTS)
    two, one = (state_table(case, NUM_SLOTS, state_dtype, seed=7) for _ in range(2))
    assert_same_bits(case.call(native, inputs, two, batch), case.call(single_threaded, inputs, one, batch))
    assert_same_bits(two, one)


def test_inputs_may_be_views_into_wider_rows(
    each_ops: Ops, case: Case, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs, batch = joined(_sequences(case, dtype)), state_batch(LENS, SLOTS, SNAPSHOTS)
    views = {}
    for name, x in inputs.items():
        width = x[0].numel()
        wide = torch.full((len(x), width + 19), float("nan"), dtype=x.dtype)
        wide[:, 5 : 5 + width] = x.flatten(1)
        views[name] = wide[:, 5 : 5 + width].view(x.shape)
    ours, theirs = (state_table(case, NUM_SLOTS, state_dtype, seed=7) for _ in range(2))
    assert_same_bits(case.call(each_ops, views, ours, batch), case.call(each_ops, inputs, theirs, batch))
    assert_same_bits(ours, theirs)


def test_a_state_that_dies_away_ends_at_zero(native: NativeOps, dtypes: Dtypes) -> None:
    """Numbers below the smallest normal one would take a hundred times as long."""
    state = torch.full((2, 1, 4, 8), 1e-30, dtype=dtypes[1])
    zero, log_decay = torch.zeros(1, 1, 4, dtype=dtypes[0]), torch.full((1, 1), -19.0)
    value = torch.zeros(1, 1, 8, dtype=dtypes[0])
    native.recurrence.gated_delta_rule(zero, zero, value, log_decay, log_decay, state, state_batch([1], [1]))
    assert not state[1].any()


@pytest.mark.parametrize("bounded", [False, True])
def test_delta_gates_equal_the_reference(native: NativeOps, reference: Ops, dtypes: Dtypes, bounded: bool) -> None:
    for rows, (heads, decays) in product([0, 1, 3, 200], [(1, 1), (6, 6), (8, 8 * 32), (3, 3 * 21)]):
        wide = normal((rows, decays + heads + 5), dtypes[0], seed=1, scale=5)
        scale, bias, rate = (normal((decays,), torch.float32, seed=seed) for seed in (2, 3, 4))
        decay, beta = wide[:, 3 : 3 + decays], wide[:, 5 + decays :]
        gates = DeltaGates(scale, bias, rate if bounded else None, most_beta=2.0)
        ours, theirs = (ops.recurrence.delta_gates(decay, beta, gates) for ops in (native, reference))
        for got, expected in zip(ours, theirs, strict=True):
            assert got.dtype == torch.float32
            assert_close(got, expected)


def test_delta_gates_depend_neither_on_other_rows_nor_threads(
    native: NativeOps, single_threaded: NativeOps, dtypes: Dtypes
) -> None:
    decay, beta = normal((200, 256), dtypes[0], seed=1), normal((200, 8), dtypes[0], seed=2)
    gates = DeltaGates(*(normal((256,), torch.float32, seed=seed) for seed in (3, 4)))
    together = native.recurrence.delta_gates(decay, beta, gates)
    for ops, rows in ((native, slice(17, 18)), (single_threaded, slice(None))):
        for got, expected in zip(ops.recurrence.delta_gates(decay[rows], beta[rows], gates), together, strict=True):
            assert_same_bits(got, expected[rows])
