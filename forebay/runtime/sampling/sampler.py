"""Choosing tokens. A row's choice depends on that row alone, to the bit: not on the batch, nor on its place in it.

Shape letters: N sequences that sample, D of them that draw at random, V vocabulary.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final

from torch import Tensor

from forebay.base.sampling import DRAWS
from forebay.ops import Draws, Ops
from forebay.pools.request_rows import SamplingRows


class Wants(IntFlag):
    """The needs of a row besides the most likely token. A number of a draw has the bit of its place in `DRAWS`."""

    GREEDY = 0
    DRAW = 1  # which is temperature's bit
    ADJUST = 1 << 30  # penalties or logit bias
    LOGPROBS = 1 << 31


COLUMNS: Final = {number.name: Wants(1 << place) for place, number in enumerate(DRAWS)}


def draw(ops: Ops, logits: Tensor, rows: Tensor, lens: Tensor, table: SamplingRows, wants: Wants) -> Tensor:
    """Draw one token per row of logits [D, V] float32 -> ids [D] int64; 0 if the logits are not finite.

    `rows` [D] are the rows of `table` with the parameters; `lens` [D] are the positions of the tokens drawn, which
    together with the row's seed determine the random number. `wants` is the union of the rows' features.
    """
    columns = {name: table[name].index_select(0, rows) for name, wanted in COLUMNS.items() if wants & wanted}
    columns["uniform"] = uniforms(table.seed.index_select(0, rows), lens)
    return ops.sampling.sample_rows(logits, Draws._make(columns.get(name) for name in Draws._fields))


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number of [0, 1) per (seed, position), float64 with 53 random bits.

    splitmix64's finalizer over a Weyl sequence keyed by the seed (Steele, Lea and Flood, OOPSLA 2014, section 5).
    Integers wrap in int64, where a right shift must drop the copies of the sign.
    """
    x = _mix(seeds + _signed(0x9E3779B97F4A7C15)) + positions * _signed(0x9E3779B97F4A7C15)
    return _shift(_mix(x), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
