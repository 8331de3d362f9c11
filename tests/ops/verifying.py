"""Steps that verify sequences with recurrent states, for the tests of every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.recurrence import StateBatch
from forebay.ops.states import StateColumns, Wishes
from tests.ops.recurrences import Case, Inputs, cut, joined, state_batch

NUM_SLOTS = 13  # with the padding slot; scratch rows are behind


class Verified(NamedTuple):
    """A sequence of `num_tokens` tokens behind `start` others, whose first `num_new` stay. Its state is wished for at
    `wish` tokens, in `wish_slot`."""

    slot: int
    start: int
    num_tokens: int
    num_new: int
    wish: int = 0
    wish_slot: int = 0


RAGGED = [
    Verified(slot=3, start=7, num_tokens=4, num_new=2, wish=8, wish_slot=9),
    Verified(slot=1, start=0, num_tokens=1, num_new=1, wish=1, wish_slot=10),  # not verified
    Verified(slot=5, start=30, num_tokens=3, num_new=3, wish=33, wish_slot=11),
    Verified(slot=6, start=2, num_tokens=0, num_new=0, wish=2, wish_slot=8),
    Verified(slot=2, start=15, num_tokens=4, num_new=1, wish=17, wish_slot=7),  # its wish is not come to
    Verified(slot=4, start=16, num_tokens=2, num_new=1, wish=16, wish_slot=8),  # nor this one, which is past
    Verified(slot=12, start=3, num_tokens=2, num_new=0),  # nothing of it stays
    Verified(slot=0, start=0, num_tokens=3, num_new=2),  # padding
    Verified(slot=0, start=0, num_tokens=0, num_new=0),
]
STEPS = {
    "none": [],
    "one": [Verified(slot=1, start=4, num_tokens=3, num_new=2, wish=6, wish_slot=2)],
    "one-token": [Verified(slot=1, start=4, num_tokens=1, num_new=1)],
    "all-rejected": [Verified(slot=1, start=4, num_tokens=4, num_new=1, wish=5, wish_slot=2)],
    "ragged": RAGGED,
}


def batch_of(step: Sequence[Verified]) -> StateBatch:
    """Scratch rows for each token of the live sequences that have several."""
    lens, scratch, snapshots = [seq.num_tokens for seq in step], NUM_SLOTS, []
    for seq in step:
        verified = seq.num_tokens > 1 and seq.slot > 0
        snapshots.append([(t + 1, scratch + t if verified else 0) for t in range(seq.num_tokens)])
        scratch += seq.num_tokens * verified
    slots = [seq.slot for seq in step]
    write_slots = [slot if num_tokens == 1 else 0 for slot, num_tokens in zip(slots, lens, strict=True)]
    return state_batch(lens, slots, snapshots, write_slots=write_slots)


def num_rows(step: Sequence[Verified]) -> int:
    """Of the table: one row more than is used, which nobody may touch."""
    return NUM_SLOTS + sum(seq.num_tokens for seq in step) + 1


def commit(ops: Ops, tables: Sequence[Tensor], batch: StateBatch, step: Sequence[Verified]) -> None:
    positions = [seq.start + t if seq.slot else 0 for seq in step for t in range(seq.num_tokens)]
    wishes = Wishes(
        torch.tensor([seq.wish for seq in step], dtype=torch.int64),
        torch.tensor([seq.wish_slot for seq in step], dtype=torch.int32),
    )
    num_new = torch.tensor([seq.num_new for seq in step], dtype=torch.int64)
    ops.commit_states(StateColumns(tuple(tables)), batch, torch.tensor(positions, dtype=torch.int64), num_new, wishes)


def verify(ops: Ops, case: Case, inputs: Sequence[Inputs], table: Tensor, step: Sequence[Verified]) -> Tensor:
    batch = batch_of(step)
    out = case.call(ops, joined(inputs), table, batch)
    commit(ops, [table], batch, step)
    return out


def decode(
    ops: Ops, case: Case, inputs: Sequence[Inputs], table: Tensor, step: Sequence[Verified]
) -> list[list[Tensor]]:
    """The tokens that stay, one step each, and a copy where somebody wishes for one. Outputs by sequence and token."""
    outputs: list[list[Tensor]] = [[] for _ in step]
    for seq, tokens, out in zip(step, inputs, outputs, strict=True):
        for t in range(seq.num_new if seq.slot else 0):
            out.append(case.call(ops, cut(tokens, t, t + 1), table, state_batch([1], [seq.slot])))
            if seq.wish_slot and seq.start + t + 1 == seq.wish:
                table[seq.wish_slot] = table[seq.slot]
    return outputs
