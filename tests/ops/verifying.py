"""Steps that verify sequences with recurrent states, for the tests of every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.reference.recurrence import StateBatch
from tests.ops.helpers import assert_same_bits
from tests.ops.recurrences import Case, Inputs, cut, joined, state_batch

NUM_SLOTS = 14  # with the padding slot


class Verified(NamedTuple):
    """A sequence of `num_tokens` tokens behind `start` others, whose first `num_new` stay. Its state is wished for at
    `wish` tokens, in `wish_slot`. `certain`: all stay, and nothing is wished for."""

    slot: int
    start: int
    num_tokens: int
    num_new: int
    wish: int = 0
    wish_slot: int = 0
    certain: bool = False

    @property
    def write_slot(self) -> int:
        return self.slot if self.certain else 0


RAGGED = [
    Verified(slot=3, start=7, num_tokens=4, num_new=2, wish=8, wish_slot=9),
    Verified(slot=1, start=0, num_tokens=1, num_new=1, wish=1, wish_slot=10),  # not verified
    Verified(slot=5, start=30, num_tokens=3, num_new=3, wish=33, wish_slot=11),
    Verified(slot=6, start=2, num_tokens=0, num_new=0, wish=2, wish_slot=8),
    Verified(slot=2, start=15, num_tokens=4, num_new=1, wish=17, wish_slot=7),  # its wish is not come to
    Verified(slot=4, start=16, num_tokens=2, num_new=1, wish=16, wish_slot=8),  # nor this one, which is past
    Verified(slot=12, start=3, num_tokens=2, num_new=0),  # nothing of it stays
    Verified(slot=13, start=9, num_tokens=1, num_new=1, certain=True),
    Verified(slot=0, start=0, num_tokens=3, num_new=2),  # padding
    Verified(slot=0, start=0, num_tokens=0, num_new=0),
]
STEPS = {
    "none": [],
    "one": [Verified(slot=1, start=4, num_tokens=3, num_new=2, wish=6, wish_slot=2)],
    "one-token": [Verified(slot=1, start=4, num_tokens=1, num_new=1, certain=True)],
    "all-rejected": [Verified(slot=1, start=4, num_tokens=4, num_new=1, wish=5, wish_slot=2)],
    "ragged": RAGGED,
}


def stops_of(ops: Ops, step: Sequence[Verified], q_start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`StepOps.accepted_stops` of a step."""
    positions = [seq.start + t if seq.slot else 0 for seq in step for t in range(seq.num_tokens)]
    longs = [[seq.num_new for seq in step], positions, [seq.wish for seq in step]]
    num_new, at, wishes = (torch.tensor(column, dtype=torch.int64) for column in longs)
    ints = [seq.write_slot for seq in step], [seq.wish_slot for seq in step]
    written, slots = (torch.tensor(column, dtype=torch.int32) for column in ints)
    return ops.steps.accepted_stops(q_start, num_new, at, written, wishes, slots)


def verify(ops: Ops, case: Case, inputs: Sequence[Inputs], table: Tensor, step: Sequence[Verified]) -> Tensor:
    """All tokens without writing a state that is not certain, then those that stay once more."""
    lens, slots = [seq.num_tokens for seq in step], [seq.slot for seq in step]
    write_slots, tokens, before = [seq.write_slot for seq in step], joined(inputs), table.clone()
    batch = state_batch(lens, slots, write_slots=write_slots, before=[seq.start for seq in step])
    out = case.call(ops, tokens, table, batch)
    uncertain = [slot for slot in range(1, NUM_SLOTS) if slot not in write_slots]
    assert_same_bits(table[uncertain], before[uncertain])
    q_stop, ends, wished = stops_of(ops, step, batch.q_start)
    counts = torch.arange(len(step) + 1, dtype=torch.int32)
    again = StateBatch(
        slots=batch.slots,
        write_slots=batch.slots,
        q_start=batch.q_start,
        q_stop=q_stop,
        snap_start=counts,
        snap_ends=ends,
        snap_slots=wished,
        positions=batch.positions,
    )
    case.call(ops, tokens, table, again)
    return out


def decode(
    ops: Ops, case: Case, inputs: Sequence[Inputs], table: Tensor, step: Sequence[Verified]
) -> list[list[Tensor]]:
    """Decode the tokens that stay, one of each sequence in a step, and copy a state where a sequence wishes for it.

    Returns outputs by sequence and token."""
    outputs: list[list[Tensor]] = [[] for _ in step]
    for t in range(max((seq.num_new for seq in step), default=0)):
        live = [i for i, seq in enumerate(step) if seq.slot and t < seq.num_new]
        if not live:
            break
        slots, before = [step[i].slot for i in live], [step[i].start + t for i in live]
        tokens = joined([cut(inputs[i], t, t + 1) for i in live])
        out = case.call(ops, tokens, table, state_batch([1] * len(live), slots, before=before))
        for at, i in enumerate(live):
            outputs[i].append(out[at : at + 1])
            if step[i].wish_slot and step[i].start + t + 1 == step[i].wish:
                table[step[i].wish_slot] = table[step[i].slot]
    return outputs
