"""Weights that stay in the codes of their file, in groups along the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError

GROUP: Final = 32  # inputs that share a scale

# Fewest bits of the embedding and the head: 4-bit checkpoints of all kinds have them in more than the layers, and a
# token reads only one row of the first.
HEAD_BITS: Final = 8

Order = npt.NDArray[np.int64]


class Quantization(StrEnum):
    """What matrices are held in."""

    NONE = "none"  # the model's dtype
    FILE = "file"  # the file's own codes, where it has some that are held without loss, else the model's dtype
    INT8 = "int8"
    INT4 = "int4"


QUANTIZED_BITS: Final = {Quantization.INT8: 8, Quantization.INT4: 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFormat:
    """How the codes of a `GroupQuantized` are to be read."""

    bits: int
    zero: int
    minimums: bool

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self.bits // 8 + num_elements // GROUP * 2 * (1 + self.minimums)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupQuantized:
    """A matrix [N, K], K a multiple of `GROUP`: scale * (code - zero) + minimum, group by group along K.

    `bits` 8: codes [N, K] uint8. `bits` 4: codes [N, K // 2] uint8, where byte j of a group's 16 has element j in its
    low half and element j + 16 in its high half, as ggml's Q4_0 and Q4_1 have them. `scales` and `minimums`
    [N, K // GROUP] float16; `minimums` None where all are 0. So Q4_1 (zero 0), Q4_0 (zero 8, no minimums) and Q8_0
    (zero 128, no minimums) are held without loss.
    """

    bits: int
    zero: int
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minimums: npt.NDArray[np.float16] | None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.scales.shape[1] * GROUP

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    @property
    def format(self) -> CodeFormat:
        return CodeFormat(bits=self.bits, zero=self.zero, minimums=self.minimums is not None)

    def rows(self, order: Order) -> GroupQuantized:
        return replace(
            self,
            codes=self.codes[order],
            scales=self.scales[order],
            minimums=None if self.minimums is None else self.minimums[order],
        )

    def columns(self, groups: Order) -> GroupQuantized:
        """Whole groups of columns in another order."""
        num_rows = len(self.codes)
        by_group = self.codes.reshape(num_rows, self.scales.shape[1], -1)
        return replace(
            self,
            codes=by_group[:, groups].reshape(num_rows, -1),
            scales=self.scales[:, groups],
            minimums=None if self.minimums is None else self.minimums[:, groups],
        )

    def scaled(self, factors: npt.NDArray[np.float32]) -> GroupQuantized:
        """Row i times factors[i]. Scales and minimums are rounded to float16 again, which moves a value by at most
        three parts in 2,048 of its group's largest; bfloat16 rounds it to one in 256. ModelError beyond float16."""
        by_row = factors[:, None]
        return replace(
            self,
            scales=_half(self.scales * by_row),
            minimums=None if self.minimums is None else _half(self.minimums * by_row),
        )

    def in_format(self, form: CodeFormat) -> GroupQuantized:
        """The same values in a format that has room for them, as `common_format` finds it."""
        codes, minimums = self.codes, self.minimums
        if (self.bits, self.zero) != (form.bits, form.zero):
            by_group = codes.reshape(*self.scales.shape, -1)
            if self.bits == 4:
                by_group = np.concatenate([by_group & 15, by_group >> 4], axis=-1)
            codes = (by_group + np.uint8(form.zero - self.zero)).reshape(self.shape)
        if minimums is None and form.minimums:
            minimums = np.zeros_like(self.scales)
        return GroupQuantized(bits=form.bits, zero=form.zero, codes=codes, scales=self.scales, minimums=minimums)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCodes:
    """A matrix that a file holds in codes and that has not been read yet."""

    format: CodeFormat
    read: Callable[[], GroupQuantized]

    def rows(self, order: Order) -> StoredCodes:
        return StoredCodes(format=self.format, read=lambda: self.read().rows(order))

    def scaled(self, factors: npt.NDArray[np.float32]) -> StoredCodes:
        return StoredCodes(format=self.format, read=lambda: self.read().scaled(factors))

    def columns(self, order: Order) -> StoredCodes | None:
        """None where `order` takes a group apart."""
        by_group = order.reshape(-1, GROUP) if len(order) % GROUP == 0 else order[:, None]
        groups = by_group[:, 0] // GROUP
        if not np.array_equal(by_group, groups[:, None] * GROUP + np.arange(GROUP)):
            return None
        return StoredCodes(format=self.format, read=lambda: self.read().columns(groups))


def _half(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    if not (np.abs(values) <= np.finfo(np.float16).max).all():
        raise ModelError("a quantized weight times the model's multiplier is beyond float16: use --quantization none")
    return values.astype(np.float16)


def joined_codes(parts: Sequence[StoredCodes | None]) -> StoredCodes | None:
    """Matrices of equal width one below the other; None where one is not held in codes."""
    stored = [part for part in parts if part is not None]
    if not stored or len(stored) < len(parts):
        return None
    form = common_format([part.format for part in stored])

    def read() -> GroupQuantized:
        return joined([part.read().in_format(form) for part in stored])

    return StoredCodes(format=form, read=read)


def joined(parts: Sequence[GroupQuantized]) -> GroupQuantized:
    """Matrices of one format and width, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        minimums=np.concatenate(minimums) if minimums else None,
    )


def common_format(formats: Sequence[CodeFormat]) -> CodeFormat:
    """One that holds the values of all these: theirs where they agree, else eight bits, which have room for four."""
    minimums = any(form.minimums for form in formats)
    if len({(form.bits, form.zero) for form in formats}) == 1:
        return replace(formats[0], minimums=minimums)
    return CodeFormat(bits=8, zero=128, minimums=minimums)


# What `quantize_rows` makes, by bits.
QUANTIZED_FORMATS: Final = {
    8: CodeFormat(bits=8, zero=128, minimums=False),
    4: CodeFormat(bits=4, zero=0, minimums=True),
}


def held_format(
    quantization: Quantization, own: CodeFormat | None, *, in_features: int, min_bits: int
) -> CodeFormat | None:
    """What a matrix that the file holds in `own` codes is held in; None for the model's dtype.

    `min_bits` are the fewest that it can do with: 4, 8, or 16 for the model's dtype.
    """
    if quantization is Quantization.NONE or min_bits > 8 or in_features % GROUP:
        return None
    if quantization is Quantization.FILE:
        return own
    bits = max(min_bits, QUANTIZED_BITS[quantization])
    if own is not None and own.bits == bits:
        return own
    return QUANTIZED_FORMATS[bits]
