"""How many bytes a checkpoint's weights take, by what they are held in; nothing of them is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from forebay.formats.held_format import held_format
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import CodeFormat, StoredCodes


class WeightKind(NamedTuple):
    """The properties that decide the form in which weights are held: `own` codes in the file, their rows' length, and
    the fewest bits they can do with (see `held_format`). `bfloat16`: a matrix of layers or a table that the file has in
    bfloat16."""

    own: CodeFormat | None
    in_features: int
    min_bits: int
    bfloat16: bool = False


class ValueBytes(NamedTuple):
    """Bytes of a value that is not held in codes: in the model's dtype, and in the dtype of matrices that the file has
    in bfloat16."""

    own: int
    bfloat16: int


class HeldWeights(NamedTuple):
    """Weights that memory holds in codes, or values, of `bits` bits; `num_bytes` with their scales."""

    bits: int
    num_weights: int
    num_bytes: int


def kinds_of(
    codes: StoredCodes | None, shape: tuple[int, ...], min_bits: int, *, bfloat16: bool
) -> Iterator[tuple[WeightKind, int]]:
    """The kinds of a weight's parts, and how many weights are of each; a bare number counts as a row of one."""
    if codes is None or not codes.packs:
        yield WeightKind(None, shape[-1] if shape else 1, min_bits, bfloat16), math.prod(shape)
        return
    for form, rows in codes.runs:
        yield WeightKind(form, shape[-1], min_bits), len(rows) * shape[-1]


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """Numbers of weights by kind."""

    counts: Mapping[WeightKind, int]

    @staticmethod
    def of(weights: Iterable[tuple[WeightKind, int]]) -> WeightShapes:
        """Sum the number of elements by kind of weight."""
        counts = Counter[WeightKind]()
        for kind, number in weights:
            counts[kind] += number
        return WeightShapes(counts)

    @property
    def num_parameters(self) -> int:
        return sum(self.counts.values())

    @property
    def has_codes(self) -> bool:
        """Whether the file has weights in codes that are held without loss."""
        return any(kind.own is not None for kind in self.counts)

    def multiplies_fp8(self, quantization: Quantization) -> bool:
        """Return whether weights are held in codes that are multiplied by inputs in FP8."""
        kinds = (kind for kind in self.counts if kind.own is not None and kind.own.multiplies_fp8)
        return any(
            held_format(quantization, kind.own, in_features=kind.in_features, min_bits=kind.min_bits) is kind.own
            for kind in kinds
        )

    def held_bytes(self, quantization: Quantization, values: ValueBytes) -> int:
        """Return the bytes of all weights."""
        return sum(held.num_bytes for held in self.held(quantization, values))

    def code_bits(self, quantization: Quantization, values: ValueBytes) -> int:
        """Return the bits of the codes that hold most of the weights in codes; 0 if none are in codes."""
        codes = [held for held in self.held(quantization, values) if held.bits <= 8]
        return max(codes, key=lambda held: held.num_weights).bits if codes else 0

    def held(self, quantization: Quantization, values: ValueBytes) -> list[HeldWeights]:
        """Return the weights by the bits of the codes or values that hold them, the fewest first."""
        numbers, sizes = Counter[int](), Counter[int]()
        for kind, number in self.counts.items():
            form = held_format(quantization, kind.own, in_features=kind.in_features, min_bits=kind.min_bits)
            itemsize = values.bfloat16 if kind.bfloat16 else values.own
            bits = 8 * itemsize if form is None else form.bits
            numbers[bits] += number
            sizes[bits] += number * itemsize if form is None else form.num_bytes(number)
        return [HeldWeights(bits, number, sizes[bits]) for bits, number in sorted(numbers.items())]
