"""The product that computes the dense weights of a shape on a GPU: cuBLASLt's, or the kernel of `products`.

A row must have the same bits among any number of rows. The kernel has them by its order of sums; of cuBLASLt a probe at
the start compares them, once for each shape and type. Results are kept in a file, so that a later start chooses alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from forebay.base.log import get_logger
from forebay.ops.triton.launch import NotCompiled

PROBED_ROWS: Final = (1, 2, 7, 8, 16, 17, 64, 128, 256, 1024, 2048)  # and the most of a step
FEW_ROWS: Final = 64  # with so many or fewer a product waits for the weights
ALL_ROWS: Final = 1 << 62
_TIMED_ROWS: Final = (1, 16, FEW_ROWS)
_GAIN: Final = 0.97  # of cuBLASLt's time: less is no reason for another kernel
_MOST_BYTES: Final = 1 << 20  # of the file

Product = Callable[[Tensor], Tensor]
"""Rows [T, K] times a weight."""

_LOG: Final = get_logger("ops")


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of `products` computes up to `own_rows` rows, cuBLASLt more: 0, FEW_ROWS or ALL_ROWS."""

    own_rows: int
    why: str

    @property
    def name(self) -> str:
        """The name for the start-up table."""
        return {0: "cublas", FEW_ROWS: f"triton up to {FEW_ROWS} rows, cublas", ALL_ROWS: "triton"}[self.own_rows]


def rows_agree(product: Product, rows: Tensor) -> bool:
    """Whether `product` of the first rows, for each of PROBED_ROWS, has the bits of that of all rows, in the first row
    and the last."""
    whole = product(rows)
    parts = ((count, product(rows[:count])) for count in PROBED_ROWS if count <= len(rows))
    return all(torch.equal(part[at], whole[at]) for count, part in parts for at in (0, count - 1))


def choose(
    theirs: Sequence[Product], ours: Sequence[Product], rows: Tensor, time_us: Callable[[Product, Tensor], float]
) -> Choice:
    """Choose by the bits of a weight's products, and then by the time of the first.

    `theirs` are cuBLASLt's, in each type of the result, `ours` the kernel's.
    """
    if not all(rows_agree(product, rows) for product in theirs):
        return Choice(ALL_ROWS, f"cuBLASLt's bits depend on the number of rows, tried for up to {len(rows):,}")
    known = f"cuBLASLt's bits are equal for up to {len(rows):,} rows"
    counts = [count for count in _TIMED_ROWS if count <= len(rows)]
    for their, our in zip(theirs, ours, strict=True):
        whole = their(rows)
        if not all(torch.equal(our(rows[:count]), whole[:count]) for count in counts):
            return Choice(0, f"{known}, and others than Triton's")
    their_us, our_us = (sum(time_us(product[0], rows[:count]) for count in counts) for product in (theirs, ours))
    times = f"{our_us:,.0f} us of Triton's for {', '.join(map(str, counts))} rows, {their_us:,.0f} of cuBLASLt's"
    if our_us < _GAIN * their_us:
        return Choice(FEW_ROWS, f"{known} and Triton's: {times}")
    return Choice(0, f"{known}: {times}")


def fastest(
    theirs: Sequence[Product], ours: Sequence[Product], rows: Tensor, time_us: Callable[[Product, Tensor], float]
) -> Choice:
    """Choose by the time of the first product alone, for few rows and for many: as `choose`, for `--exact off`."""
    own_rows, reasons = 0, []
    for count, wins in ((FEW_ROWS, FEW_ROWS), (len(rows), ALL_ROWS)):
        ours_us, theirs_us = (time_us(product[0], rows[:count]) for product in (ours, theirs))
        reasons.append(
            f"{ours_us:,.0f} us of Triton's for {min(count, len(rows)):,} rows, {theirs_us:,.0f} of cuBLAS's"
        )
        if ours_us >= theirs_us:
            break
        own_rows = wins
    return Choice(own_rows, f"bits are not compared (--exact off): {'; '.join(reasons)}")


class Choices:
    """The choices of one machine, by shape and type. `found` are those of this process.

    `file` keeps them between starts, by `machine` (GPU, driver, torch, Triton); None keeps none.
    """

    def __init__(self, probe: Callable[[Tensor], Choice], file: Path | None = None, machine: str = "") -> None:
        self._probe, self._file, self._machine = probe, file, machine
        self.found: dict[str, Choice] = {}

    def of(self, weight: Tensor) -> Choice:
        """Return the choice for a weight [N, K]: this process's, the file's, or the probe's."""
        key = f"{str(weight.dtype).removeprefix('torch.')} {' x '.join(map(str, weight.shape))}"
        if key not in self.found:
            kept = self._read()
            choice = _checked(kept.get(self._machine, {}).get(key))
            self.found[key] = choice or self._probed(weight, key, kept)
        return self.found[key]

    def _probed(self, weight: Tensor, key: str, kept: dict[str, dict[str, Any]]) -> Choice:
        try:
            choice = self._probe(weight)
        except NotCompiled as error:  # not kept: the next start may have a compiler
            return Choice(0, f"Triton's kernel does not compile: {error}")
        kept.setdefault(self._machine, {})[key] = [choice.own_rows, choice.why]
        self._write(kept)
        return choice

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return what the file has, or nothing of a file that is missing, too large or damaged."""
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as file:
                kept = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError):
            return {}
        whole = isinstance(kept, dict) and all(isinstance(machine, dict) for machine in kept.values())
        return kept if whole else {}

    def _write(self, kept: dict[str, dict[str, Any]]) -> None:
        if self._file is None:
            return
        own = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(kept, indent=1))
            own.replace(self._file)
        except OSError as error:
            _LOG.warning("choices of products are not kept, the next start tries them again: %s", error)


def _checked(kept: object) -> Choice | None:
    """A choice as the file has it, or None if this version would not have written it."""
    match kept:
        case [int() as own_rows, str() as why] if own_rows in (0, FEW_ROWS, ALL_ROWS):
            return Choice(own_rows, f"{why} (kept)")
        case _:
            return None
