"""Weights that stay in the codes of their file, in groups along the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.quantization import Quantization

GROUP: Final = 32  # inputs that share a scale, but for formats that say something else
PANEL: Final = 32  # outputs that are packed together, in one format

# Fewest bits of the embedding and the head: 4-bit checkpoints of all kinds have them in more than the layers, and a
# token reads only one row of the first.
HEAD_BITS: Final = 8

# Of a weight that the loader rejects.
NOT_FINITE: Final = "has values that are not finite (NaN or infinity): the checkpoint is damaged, use another"

# What the codes of ggml's IQ4_NL and IQ4_XS stand for, 128 added.
LEVELS: Final = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)

# Codes unpacked at a time: they then stay in the second-level cache until they are packed.
_PIECE_ELEMENTS: Final = 1 << 19

Order = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


QUANTIZED_BITS: Final = {Quantization.INT8: 8, Quantization.INT4: 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFormat:
    """How the codes of a `GroupQuantized` are to be read: `bits` of each, `group` inputs that share a scale and, with
    `minimums`, a minimum.

    `factors`: scales and minimums have two levels, so many inputs share a factor of both (16 or 32; 0 for one level).
    `levels`: a code stands for that entry of `LEVELS`, not for itself.
    """

    bits: int
    minimums: bool
    group: int = GROUP
    factors: int = 0
    levels: bool = False

    @property
    def zero(self) -> int:
        """The value that is subtracted from a code: half of its range, unless a minimum replaces it."""
        if self.levels or self.bits == 8:
            return 128
        return 0 if self.minimums else 1 << self.bits - 1

    @property
    def factor_bits(self) -> int:
        """Bits of a factor as it is packed: those of two-bit codes have four, all others eight."""
        return 4 if self.bits == 2 else 8

    def num_bytes(self, num_elements: int) -> int:
        """As packed, of whole groups."""
        of_factors = num_elements // self.factors * self.factor_bits // 8 if self.factors else 0
        return num_elements * self.bits // 8 + (num_elements // self.group * 2 + of_factors) * (1 + self.minimums)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupQuantized:
    """A matrix [N, K]: scale * factor * (code - zero) + minimum * minimum factor, group by group along K.

    `codes` [N, K] uint8, one each; `scales` and `minimums` [N, K // group] float16; `factors` and `minimum_factors`
    [N, K // format.factors] int8. None is what the format has not: no minimum is 0, no factor 1.
    """

    format: CodeFormat
    codes: U8
    scales: F16
    minimums: F16 | None = None
    factors: I8 | None = None
    minimum_factors: I8 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def steps(self) -> tuple[F32, F32 | None]:
        """Return the step between codes and the least value, for as many inputs as share both, [N, groups]."""
        return _products(self.scales, self.factors), _products(self.minimums, self.minimum_factors)

    def signed_codes(self) -> npt.NDArray[np.int16]:
        """Return the codes minus their zero."""
        return (LEVELS[self.codes] if self.format.levels else self.codes) - np.int16(self.format.zero)

    def values(self) -> F32:
        """Return the dequantized weight, float32 [outputs, inputs]."""
        scales, minimums = self.steps()
        values: F32 = self.signed_codes().astype(np.float32).reshape(*scales.shape, -1)
        values *= scales[..., None]
        if minimums is not None:
            values += minimums[..., None]
        return values.reshape(self.shape)

    def check_finite(self) -> None:
        """Raise ModelError if a scale or minimum is not: all other numbers are integers."""
        if not all(part is None or np.isfinite(part).all() for part in (self.scales, self.minimums)):
            raise ModelError(f"a scale or minimum {NOT_FINITE}")

    def rows(self, order: Order) -> GroupQuantized:
        """Return the weight with its output rows reordered or selected; codes are copied."""
        return self._with(self.format, lambda part, _: part[order])

    def columns(self, order: Order) -> GroupQuantized:
        """Columns in another order, which leaves no group and no factor's inputs apart."""

        def taken(part: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
            return part[:, order[::size] // size]

        return self._with(self.format, taken)

    def regrouped(self, group: int) -> GroupQuantized:
        """Return a copy with the scales repeated for each `group` inputs, which divides the groups that there are."""
        times = self.format.group // group

        def repeated(part: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
            return part.repeat(times, axis=1) if part.dtype == np.float16 and times > 1 else part

        return self._with(replace(self.format, group=group), repeated)

    def _with(self, form: CodeFormat, change: Callable[[Any, int], Any]) -> GroupQuantized:
        """Every part as `change` makes it, which is told how many inputs an entry has."""
        parts: dict[str, Any] = {}
        for name in _ARRAYS:
            part = getattr(self, name)
            parts[name] = None if part is None else change(part, self.shape[1] // part.shape[1])
        return replace(self, format=form, **parts)

    def scaled(self, factors: F32) -> GroupQuantized:
        """Row i times factors[i]. Scales and minimums are rounded to float16 again, which moves a value by at most
        three parts in 2,048 of its group's largest; bfloat16 rounds it to one in 256. ModelError beyond float16."""
        by_row = factors[:, None]
        minimums = None if self.minimums is None else half(self.minimums * by_row)
        return replace(self, scales=half(self.scales * by_row), minimums=minimums)


_ARRAYS: Final = ("codes", "scales", "minimums", "factors", "minimum_factors")


def _products(numbers: F16 | None, factors: I8 | None) -> Any:
    if numbers is None or factors is None:
        return None if numbers is None else numbers.astype(np.float32)
    by_group = factors.reshape(*numbers.shape, -1) * numbers[..., None].astype(np.float32)
    return by_group.reshape(factors.shape)


def half(values: F32) -> F16:
    """Scales or minimums as they are held; ModelError beyond float16."""
    if not (np.abs(values) <= np.finfo(np.float16).max).all():
        raise ModelError("a scale or minimum of weights in codes is beyond float16: use --quantization none")
    return values.astype(np.float16)


Reader = Callable[[Order], GroupQuantized]
"""Some rows of a matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedRows:
    """A matrix [num_rows, width] of one format that has not been read yet; `open` gives what reads it."""

    format: CodeFormat
    num_rows: int
    width: int
    open: Callable[[], Reader]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredCodes:
    """A matrix in codes that has not been read yet: rows `order` of the `sources`, which are counted one below the
    other, each times its factor if there are `factors`."""

    sources: tuple[CodedRows, ...]
    order: Order
    factors: F32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.order), self.sources[0].width

    @property
    def runs(self) -> tuple[tuple[CodeFormat, range], ...]:
        """Rows of one format that follow each other."""
        formats = [source.format for source in self.sources]
        numbers = np.array([formats.index(form) for form in formats])[self._owners()]
        ends = [*(1 + np.flatnonzero(np.diff(numbers))).tolist(), len(numbers)]
        starts = [0, *ends[:-1]]
        return tuple(
            (formats[numbers[start]], range(start, end)) for start, end in zip(starts, ends, strict=True) if end > start
        )

    @property
    def packs(self) -> bool:
        """Whether every panel has one format."""
        return all(rows.start % PANEL == 0 for _, rows in self.runs)

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes(len(rows) * self.shape[1]) for form, rows in self.runs)

    def _owners(self) -> Order:
        """Return the source number of each row."""
        ends = np.cumsum([source.num_rows for source in self.sources])
        return ends.searchsorted(self.order, side="right")

    def rows(self, order: Order) -> StoredCodes:
        """Return the weight with its output rows reordered or selected; nothing is read yet."""
        return replace(self, order=self.order[order], factors=None if self.factors is None else self.factors[order])

    def scaled(self, factors: F32) -> StoredCodes:
        """Return the weight with each output row multiplied by its factor [outputs]; nothing is read yet."""
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    def columns(self, order: Order) -> StoredCodes | None:
        """None where `order` takes apart what is multiplied at once: `GROUP` inputs."""
        sources = [_reordered(source, order) for source in self.sources]
        found = tuple(source for source in sources if source is not None)
        return replace(self, sources=found) if len(found) == len(sources) else None

    def pieces(self, run: range, most_elements: int = _PIECE_ELEMENTS) -> Iterator[GroupQuantized]:
        """The rows of a run in their order; all pieces but the last are whole panels."""
        readers: dict[int, Reader] = {}
        firsts = np.cumsum([0, *(source.num_rows for source in self.sources)])
        owners, step = self._owners(), max(1, most_elements // self.shape[1] // PANEL) * PANEL
        for first in range(run.start, run.stop, step):
            rows = slice(first, min(first + step, run.stop))
            cuts = np.flatnonzero(np.diff(owners[rows])) + 1
            parts = []
            for order, owner in zip(np.split(self.order[rows], cuts), owners[rows][[0, *cuts]].tolist(), strict=True):
                if owner not in readers:
                    readers[owner] = self.sources[owner].open()
                parts.append(readers[owner](order - firsts[owner]))
            piece = joined(parts)
            piece.check_finite()
            yield piece if self.factors is None else piece.scaled(self.factors[rows])


def stored_codes(form: CodeFormat, shape: tuple[int, int], open_rows: Callable[[], Reader]) -> StoredCodes:
    """Return a weight [outputs, inputs] in the codes of one file, whose rows `open_rows` reads when needed."""
    source = CodedRows(format=form, num_rows=shape[0], width=shape[1], open=open_rows)
    return StoredCodes(sources=(source,), order=np.arange(shape[0]))


def _reordered(source: CodedRows, order: Order) -> CodedRows | None:
    """With its columns in another order, in groups as large as that leaves them; None where it leaves none."""
    starts = np.flatnonzero(np.diff(order, prepend=-2) != 1)  # of runs of neighbours
    group = math.gcd(source.format.group, len(order), *starts.tolist(), *order[starts].tolist())
    if group % GROUP:
        return None

    def open_rows() -> Reader:
        read = source.open()
        return lambda rows: read(rows).regrouped(group).columns(order)

    return replace(source, format=replace(source.format, group=group), width=len(order), open=open_rows)


def joined_codes(parts: Sequence[StoredCodes | None]) -> StoredCodes | None:
    """Matrices of equal width one below the other; None where one is not held in codes."""
    stored = [part for part in parts if part is not None]
    if not stored or len(stored) < len(parts):
        return None
    if len(stored) == 1:
        return stored[0]
    firsts = np.cumsum([0, *(sum(source.num_rows for source in part.sources) for part in stored)])
    factors = [np.ones(len(p.order), np.float32) if p.factors is None else p.factors for p in stored]
    return StoredCodes(
        sources=tuple(source for part in stored for source in part.sources),
        order=np.concatenate([part.order + first for part, first in zip(stored, firsts[:-1], strict=True)]),
        factors=None if all(part.factors is None for part in stored) else np.concatenate(factors),
    )


def joined(parts: Sequence[GroupQuantized]) -> GroupQuantized:
    """Matrices of one format and width, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def of_all(name: str) -> Any:
        return None if getattr(first, name) is None else np.concatenate([getattr(part, name) for part in parts])

    return replace(first, **{name: of_all(name) for name in _ARRAYS})


# What `quantize_rows` makes, by bits.
QUANTIZED_FORMATS: Final = {
    8: CodeFormat(bits=8, minimums=False),
    4: CodeFormat(bits=4, minimums=True),
}


def held_format(
    quantization: Quantization, own: CodeFormat | None, *, in_features: int, min_bits: int
) -> CodeFormat | None:
    """Return the format that holds a matrix which the file has in `own` codes; None for the model's dtype.

    `min_bits` are the fewest that it can do with: 4, 8, or 16 for the model's dtype. Codes of no more bits than are
    asked for stay as they are.
    """
    if quantization is Quantization.NONE or min_bits > 8 or in_features % GROUP:
        return None
    if quantization is Quantization.FILE:
        return own
    bits = max(min_bits, QUANTIZED_BITS[quantization])
    return own if own is not None and own.bits <= bits else QUANTIZED_FORMATS[bits]
