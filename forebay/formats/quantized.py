"""Weights that stay in the codes of their file, in groups along the inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.small_floats import E2M1, E4M3, E4M3_LARGEST, E8M0_BIAS, E8M0_LARGEST, has_nan

GROUP: Final = 32  # inputs that share a scale, but for formats that say something else
FP8_GROUP: Final = 128  # inputs of a product that share a scale if they are rounded to FP8
PANEL: Final = 32  # outputs that are packed together, in one format

# Fewest bits of the embedding and the head: 4-bit checkpoints of all kinds have them in more than the layers, and a
# token reads only one row of the first.
HEAD_BITS: Final = 8
ENCODER_BITS: Final = 12  # of a text encoder's first layers of each part: codes of a file, and none that are made

# Of a weight that the loader rejects.
NOT_FINITE: Final = "has values that are not finite (NaN or infinity): the checkpoint is damaged, use another"

BEYOND_HALF: Final = "a scale or minimum of weights in codes is beyond float16: use --quantization none"

# Codes unpacked at a time: they then stay in the second-level cache until they are packed.
_PIECE_ELEMENTS: Final = 1 << 19

Order = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


Scales = F16 | F32 | U8
"""Of the type that a `ScaleType` names."""


class Levels(IntEnum):
    """The numbers that codes stand for: themselves less a zero, whole ones of a table, or floats (see cpu/codes.h)."""

    NONE = 0
    IQ4 = 1  # of ggml's IQ4_NL and IQ4_XS
    E2M1 = 2  # floats of four bits, doubled, so that all are whole
    E4M3 = 3  # floats of eight bits


# What the codes of four bits stand for, 128 added.
LEVELS: Final = {
    Levels.IQ4: np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8),
    Levels.E2M1: (2 * E2M1 + 128).astype(np.uint8),
}


class ScaleType(IntEnum):
    """Types in which scales are stored (`Scales` of cpu/codes.h)."""

    FLOAT16 = 0
    E8M0 = 1  # a byte e for 2^(e - 128), which is half of its E8M0: the levels of E2M1 are doubled
    FLOAT32 = 2  # factors beside them, if there are any, are E4M3


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFormat:
    """How the codes of a `GroupQuantized` are to be read: `bits` of each, `group` inputs that share a scale and, with
    `minimums`, a minimum.

    `factors`: the number of inputs that share a factor of scale and minimum, which then have two levels (16 or 32; 0
    for one level).
    """

    bits: int
    minimums: bool
    group: int = GROUP
    factors: int = 0
    levels: Levels = Levels.NONE
    scales: ScaleType = ScaleType.FLOAT16

    @property
    def zero(self) -> int:
        """The value that is subtracted from a code: half of its range, unless a minimum replaces it."""
        if self.levels is Levels.E4M3:
            return 0
        if self.levels or self.bits == 8:
            return 128
        return 0 if self.minimums else 1 << self.bits - 1

    @property
    def multiplies_fp8(self) -> bool:
        """Whether codes can be multiplied by inputs in FP8: they are FP8, in groups of whole FP8_GROUP inputs."""
        return self.levels is Levels.E4M3 and not self.factors and self.group % FP8_GROUP == 0

    @property
    def factor_bits(self) -> int:
        """Bits of a factor as it is packed: those of two-bit codes have four, all others eight."""
        return 4 if self.bits == 2 else 8

    def num_bytes(self, num_elements: int) -> int:
        """As packed, of whole groups."""
        of_factors = num_elements // self.factors * self.factor_bits // 8 if self.factors else 0
        of_scales = num_elements // self.group * SCALE_DTYPES[self.scales].itemsize
        return num_elements * self.bits // 8 + (of_scales + of_factors) * (1 + self.minimums)


SCALE_DTYPES: Final[dict[ScaleType, np.dtype[Any]]] = {
    ScaleType.FLOAT16: np.dtype(np.float16),
    ScaleType.E8M0: np.dtype(np.uint8),
    ScaleType.FLOAT32: np.dtype(np.float32),
}


MXFP4: Final = CodeFormat(bits=4, minimums=False, levels=Levels.E2M1, scales=ScaleType.E8M0)
FP8: Final = CodeFormat(bits=8, minimums=False, levels=Levels.E4M3, scales=ScaleType.FLOAT32)
NVFP4: Final = CodeFormat(bits=4, minimums=False, factors=16, levels=Levels.E2M1, scales=ScaleType.FLOAT32)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupQuantized:
    """A matrix [N, K]: scale * factor * (code - zero) + minimum * minimum factor, group by group along K.

    `codes` [N, K] uint8, one each; `scales` [N, K // group] of the format's type and `minimums` in float16; `factors`
    and `minimum_factors` [N, K // format.factors] int8, or E4M3 as uint8. None is what the format has not: no minimum
    is 0, no factor 1.
    """

    format: CodeFormat
    codes: U8
    scales: Scales
    minimums: F16 | None = None
    factors: I8 | U8 | None = None
    minimum_factors: I8 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def steps(self) -> tuple[F32, F32 | None]:
        """Return the step between codes and the least value, for as many inputs as share both, [N, groups]."""
        scales: npt.NDArray[Any] = self.scales
        factors: npt.NDArray[Any] | None = self.factors
        if self.format.scales is ScaleType.E8M0:
            scales = np.ldexp(np.float32(1), scales.astype(np.int32) - (E8M0_BIAS + 1))
        if factors is not None and self.format.scales is ScaleType.FLOAT32:
            factors = E4M3[factors]
        return _products(scales, factors), _products(self.minimums, self.minimum_factors)

    def signed_codes(self) -> npt.NDArray[np.int16]:
        """Return the codes minus their zero, of formats whose codes stand for whole numbers."""
        table = LEVELS.get(self.format.levels)
        return (self.codes if table is None else table[self.codes]) - np.int16(self.format.zero)

    def values(self) -> F32:
        """Return the dequantized weight, float32 [outputs, inputs]."""
        scales, minimums = self.steps()
        floats = self.format.levels is Levels.E4M3
        numbers: F32 = E4M3[self.codes] if floats else self.signed_codes().astype(np.float32)
        values = numbers.reshape(*scales.shape, -1)
        values *= scales[..., None]
        if minimums is not None:
            values += minimums[..., None]
        return values.reshape(self.shape)

    def check_finite(self) -> None:
        """Raise ModelError if a weight is not: a scale or minimum, a float of eight bits, or a product of these."""
        form = self.format
        if form.scales is ScaleType.E8M0:
            finite = bool((self.scales <= E8M0_LARGEST).all())
        elif form.scales is ScaleType.FLOAT32:
            # The products with the largest number, and of the levels with the largest factor.
            largest = E4M3_LARGEST * (2 * float(E2M1.max()) if form.factors else 1)
            finite = bool((np.abs(self.scales) <= float(np.finfo(np.float32).max) / largest).all())
        else:
            finite = _float16_is_finite(self.scales)
        if not finite or not (self.minimums is None or _float16_is_finite(self.minimums)):
            raise ModelError(f"a scale or minimum {NOT_FINITE}")
        bytes_of_floats = (self.codes if form.levels is Levels.E4M3 else None, self.factors)
        if any(part is not None and part.dtype == np.uint8 and has_nan(part) for part in bytes_of_floats):
            raise ModelError(f"a float of eight bits {NOT_FINITE}")

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
            return part.repeat(times, axis=1) if part is self.scales or part is self.minimums else part

        return self._with(replace(self.format, group=group), repeated)

    def _with(self, form: CodeFormat, change: Callable[[Any, int], Any]) -> GroupQuantized:
        """Return a copy with every part changed by `change`, which gets the number of inputs of an entry."""

        def changed(part: Any) -> Any:
            return None if part is None else change(part, self.shape[1] // part.shape[1])

        return replace(
            self,
            format=form,
            codes=changed(self.codes),
            scales=changed(self.scales),
            minimums=changed(self.minimums),
            factors=changed(self.factors),
            minimum_factors=changed(self.minimum_factors),
        )

    def scaled(self, factors: F32) -> GroupQuantized:
        """Row i times factors[i]. Scales and minimums are rounded to their type again: in float16 this moves a value by
        at most three parts in 2,048 of its group's largest; bfloat16 rounds it to one in 256. ModelError beyond the
        type."""
        by_row = factors[:, None]
        minimums = None if self.minimums is None else half(self.minimums * by_row)
        scales = self.scales * by_row
        scaled = replace(self, scales=scales if self.format.scales is ScaleType.FLOAT32 else half(scales))
        scaled.check_finite()
        return replace(scaled, minimums=minimums)


def _float16_is_finite(values: npt.NDArray[Any]) -> bool:
    """Compare their bits: numpy widens each float16, which takes a third of the time of quantizing."""
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00)


_ARRAYS: Final = ("codes", "scales", "minimums", "factors", "minimum_factors")


def _products(numbers: npt.NDArray[Any] | None, factors: npt.NDArray[Any] | None) -> Any:
    if numbers is None or factors is None:
        return None if numbers is None else numbers.astype(np.float32)
    by_group = factors.reshape(*numbers.shape, -1) * numbers[..., None].astype(np.float32)
    return by_group.reshape(factors.shape)


def half(values: F32) -> F16:
    """Scales or minimums as they are held; ModelError beyond float16."""
    if not (np.abs(values) <= np.finfo(np.float16).max).all():
        raise ModelError(BEYOND_HALF)
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

    @property
    def num_source_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    def _owners(self) -> Order:
        """Return the source number of each row."""
        ends = np.cumsum([source.num_rows for source in self.sources])
        return ends.searchsorted(self.order, side="right")

    def rows(self, order: Order) -> StoredCodes:
        """Return the weight with its output rows reordered or selected; nothing is read yet."""
        return replace(self, order=self.order[order], factors=None if self.factors is None else self.factors[order])

    def scaled(self, factors: F32) -> StoredCodes | None:
        """Return the weight with each output row multiplied by its factor [outputs], unread; None if its scales are
        powers of two."""
        if any(source.format.scales is ScaleType.E8M0 for source in self.sources):
            return None
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    def columns(self, order: Order) -> StoredCodes | None:
        """None if `order` separates inputs that are multiplied together: `GROUP` inputs."""
        sources = [_reordered(source, order) for source in self.sources]
        found = tuple(source for source in sources if source is not None)
        return replace(self, sources=found) if len(found) == len(sources) else None

    def pieces(self, run: range, most_elements: int = _PIECE_ELEMENTS) -> Iterator[GroupQuantized]:
        """The rows of a run in their order; all pieces but the last are whole panels."""
        readers: dict[int, Reader] = {}
        firsts = np.cumsum([0, *(source.num_rows for source in self.sources)])
        owners, step = self._owners(), max(1, most_elements // self.shape[1] // PANEL) * PANEL
        changes = np.flatnonzero(np.diff(owners)) + 1
        for first in range(run.start, run.stop, step):
            rows = slice(first, min(first + step, run.stop))
            cuts = [rows.start, *changes[(changes > rows.start) & (changes < rows.stop)].tolist(), rows.stop]
            parts = []
            for begin, end in itertools.pairwise(cuts):
                owner = int(owners[begin])
                if owner not in readers:
                    readers[owner] = self.sources[owner].open()
                parts.append(readers[owner](self.order[begin:end] - firsts[owner]))
            piece = joined(parts)
            piece.check_finite()
            yield piece if self.factors is None else piece.scaled(self.factors[rows])


def stored_codes(form: CodeFormat, shape: tuple[int, int], open_rows: Callable[[], Reader]) -> StoredCodes:
    """Return a weight [outputs, inputs] in the codes of one file, whose rows `open_rows` reads when needed."""
    source = CodedRows(format=form, num_rows=shape[0], width=shape[1], open=open_rows)
    return StoredCodes(sources=(source,), order=np.arange(shape[0]))


def values_of(codes: StoredCodes, where: str) -> Iterator[F32]:
    """Yield the dequantized weight as blocks of rows. ModelError, which begins with `where`, if a value is not
    finite."""
    try:
        for _, run in codes.runs:
            for piece in codes.pieces(run):
                yield piece.values()
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}") from None


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


def _joined_factors(stored: Sequence[StoredCodes]) -> F32 | None:
    """Return the factors of all rows, 1 for a matrix without factors; None if no matrix has any."""
    if all(part.factors is None for part in stored):
        return None
    return np.concatenate(
        [np.ones(len(part.order), np.float32) if part.factors is None else part.factors for part in stored]
    )


def joined_codes(parts: Sequence[StoredCodes | None]) -> StoredCodes | None:
    """Return matrices of equal width one below the other; None if one is not held in codes."""
    stored = [part for part in parts if part is not None]
    if not stored or len(stored) < len(parts):
        return None
    if len(stored) == 1:
        return stored[0]
    firsts = np.cumsum([0, *(part.num_source_rows for part in stored)])
    return StoredCodes(
        sources=tuple(source for part in stored for source in part.sources),
        order=np.concatenate([part.order + first for part, first in zip(stored, firsts[:-1], strict=True)]),
        factors=_joined_factors(stored),
    )


def joined(parts: Sequence[GroupQuantized]) -> GroupQuantized:
    """Matrices of one format and width, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def of_all(name: str) -> Any:
        return None if getattr(first, name) is None else np.concatenate([getattr(part, name) for part in parts])

    return replace(
        first,
        codes=of_all("codes"),
        scales=of_all("scales"),
        minimums=of_all("minimums"),
        factors=of_all("factors"),
        minimum_factors=of_all("minimum_factors"),
    )
