from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native import NativeOps
from forebay.ops.states import StateColumns, Wishes
from forebay.ops.tape import Tape
from tests.ops.helpers import assert_close, assert_same_bits
from tests.ops.recurrences import CASES, Case, Conv, state_table
from tests.ops.verifying import NUM_SLOTS, RAGGED, STEPS, Verified, batch_of, commit, decode, num_rows, verify

NAN = float("nan")


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "bfloat16", "bfloat16-states"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_c16_after_a_verify_every_slot_is_as_plain_decode_steps_leave_it(
    each_ops: Ops, case: Case, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    dtype, state_dtype = dtypes[0], dtypes[0] if isinstance(case, Conv) else dtypes[1]
    inputs = [case.inputs(seq.num_tokens, dtype, seed=100 * i) for i, seq in enumerate(RAGGED)]
    verified = state_table(case, num_rows(RAGGED), state_dtype, seed=7)
    verified[0] = verified[NUM_SLOTS:] = NAN
    decoded = verified.clone()
    outputs = verify(each_ops, case, inputs, verified, RAGGED).split([seq.num_tokens for seq in RAGGED])
    expected = decode(each_ops, case, inputs, decoded, RAGGED)
    assert verified[0].isnan().all()
    assert verified[-1].isnan().all()
    same = assert_close if each_ops.name == "torch" else assert_same_bits  # torch's exp is another at a row's end
    same(verified[1:NUM_SLOTS], decoded[1:NUM_SLOTS])
    for out, tokens in zip(outputs, expected, strict=True):
        for t, plain in enumerate(tokens):
            same(out[t : t + 1], plain)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_commit_copies_rows_of_all_sizes_and_dtypes(
    native: NativeOps, single_threaded: NativeOps, reference: Ops, step: list[Verified]
) -> None:
    shapes = [((3, 5), torch.bfloat16), ((2, 7, 64), torch.float32), ((1,), torch.bfloat16), ((300,), torch.float32)]
    rows = num_rows(step)
    tables = [torch.rand(rows, *shape).to(dtype) for shape, dtype in shapes]
    results = []
    for ops in (reference, native, single_threaded):
        results.append([table.clone() for table in tables])
        commit(ops, results[-1], batch_of(step), step)
    for i, table in enumerate(tables):
        for seq, scratch in _scratch_of(step):
            if seq.num_new and scratch:
                table[seq.slot] = table[scratch + seq.num_new - 1]
            if 0 < (wished := seq.wish - seq.start) <= seq.num_new:
                table[seq.wish_slot] = table[scratch + wished - 1 if scratch else seq.slot]
        for result in results:
            assert_same_bits(result[i], table)


def _scratch_of(step: list[Verified]) -> list[tuple[Verified, int]]:
    """The first scratch row of each sequence, 0 for those that have none."""
    found, scratch = [], NUM_SLOTS
    for seq in step:
        verified = seq.slot > 0 and seq.num_tokens > 1
        found.append((seq, scratch if verified else 0))
        scratch += seq.num_tokens * verified
    return found


def test_a_commit_on_a_tape_follows_what_was_accepted_since(native: NativeOps) -> None:
    step = STEPS["one"]
    table, tape, num_new = torch.rand(num_rows(step), 3, 40), Tape(native.kernels), torch.tensor([0])
    columns, batch, before = StateColumns((table,)), batch_of(step), table.clone()
    positions, wishes = torch.tensor([4, 5, 6]), Wishes(torch.tensor([6]), torch.tensor([2], dtype=torch.int32))
    with tape.recording():
        native.commit_states(columns, batch, positions, num_new, wishes)
    for accepted, live, wished in ((3, 15, 14), (1, 13, 2), (0, 1, 2)):
        table.copy_(before)
        num_new.fill_(accepted)
        tape.replay()
        assert_same_bits(table, before[[0, live, wished, *range(3, len(before))]])
    assert len(tape) == 1


def test_a_model_without_states_has_nothing_to_commit(each_ops: Ops) -> None:
    commit(each_ops, [], batch_of(RAGGED), RAGGED)
