from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.native.recording import Recording
from tests.ops.helpers import assert_close, assert_same_bits
from tests.ops.recurrences import CASES, Case, Conv, state_table
from tests.ops.verifying import NUM_SLOTS, RAGGED, STEPS, Verified, decode, stops_of, verify

pytestmark = pytest.mark.quick(24)

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
    verified = state_table(case, NUM_SLOTS, state_dtype, seed=7)
    verified[0] = NAN
    decoded = verified.clone()
    outputs = verify(each_ops, case, inputs, verified, RAGGED).split([seq.num_tokens for seq in RAGGED])
    expected = decode(each_ops, case, inputs, decoded, RAGGED)
    assert verified[0].isnan().all()
    same = assert_close if each_ops.name == "torch" else assert_same_bits  # torch's exp is another at a row's end
    same(verified[1:], decoded[1:])
    for out, tokens in zip(outputs, expected, strict=True):
        for t, plain in enumerate(tokens):
            same(out[t : t + 1], plain)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_tokens_that_stay_stop_where_they_do_and_come_to_wishes_or_not(each_ops: Ops, step: list[Verified]) -> None:
    lens = torch.tensor([0, *(seq.num_tokens for seq in step)])
    q_start = lens.cumsum(0).int()
    stops, ends, slots = (column.tolist() for column in stops_of(each_ops, step, q_start))
    for i, (seq, first) in enumerate(zip(step, q_start.tolist(), strict=False)):
        assert stops[i] == first + (0 if seq.certain else seq.num_new)
        come_to = seq.start < seq.wish <= seq.start + seq.num_new
        assert slots[i] == (seq.wish_slot if come_to else 0)
        if slots[i]:
            assert ends[i] == first + seq.wish - seq.start


def test_stops_in_a_recording_follow_what_was_accepted_since(native: NativeOps) -> None:
    recording, num_new = Recording(native.kernels), torch.tensor([0])
    q_start, written, slots = (torch.tensor(values, dtype=torch.int32) for values in ([0, 3], [0], [2]))
    inputs = q_start, num_new, torch.tensor([4, 5, 6]), written, torch.tensor([6]), slots
    with recording.record():
        stops, ends, due = native.steps.accepted_stops(*inputs)
    for accepted, wished in ((3, 2), (1, 0), (2, 2)):
        num_new.fill_(accepted)
        recording.replay()
        assert (stops.tolist(), ends.tolist(), due.tolist()) == ([accepted], [2], [wished])
    assert len(recording) == 1
