"""Matrices in codes for tests: random ones of every format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forebay.formats.gguf_types import GGML_TYPES
from forebay.formats.quantized import (
    FP8,
    GROUP,
    NVFP4,
    SCALE_DTYPES,
    CodeFormat,
    GroupQuantized,
    Levels,
    ScaleType,
    StoredCodes,
    joined_codes,
    stored_codes,
)
from forebay.formats.small_floats import E4M3

# Of types with one format the first.
_NAMES = {block.codes: block.name for _, block in sorted(GGML_TYPES.items(), reverse=True)}
FORMATS = {name: form for form, name in reversed(_NAMES.items()) if form is not None} | {
    "8 bits with minimums": CodeFormat(bits=8, minimums=True),
    "4 bits by 128": CodeFormat(bits=4, minimums=True, group=128),
    "FP8": FP8,
    "FP8 by 128": replace(FP8, group=128),
    "NVFP4": NVFP4,
    "NVFP4 by 128": replace(NVFP4, group=128),
}
SIMPLE = {name: form for name, form in FORMATS.items() if form.group == GROUP}


def random_codes(form: CodeFormat, outputs: int, inputs: int, seed: int) -> GroupQuantized:
    """Every code there is, scales of either sign, and all factors of the format's bits."""
    draw = np.random.default_rng(seed)
    largest = 1 << form.factor_bits - 2 if form.factor_bits > 4 else 1 << form.factor_bits
    floats = form.scales is ScaleType.FLOAT32
    size = 16 / (1 << form.bits) / inputs**0.5 / (largest if form.factors else 1) / (16 if form.levels else 1)

    def numbers(kind: ScaleType) -> np.ndarray:
        shape = (outputs, inputs // form.group)
        if kind is ScaleType.E8M0:
            return draw.integers(120, 126, shape, dtype=np.uint8)
        values: np.ndarray = (draw.normal(size=shape) * size).astype(SCALE_DTYPES[kind])
        return values

    def bytes_without_nan(shape: tuple[int, int]) -> np.ndarray:
        return draw.choice(np.flatnonzero(np.isfinite(E4M3)), shape).astype(np.uint8)

    def factors(there: bool) -> np.ndarray | None:
        shape = (outputs, inputs // (form.factors or GROUP))
        if floats and form.factors and there:
            return bytes_without_nan(shape)
        lowest = 0 if form.minimums else -largest
        return draw.integers(lowest, largest, shape, dtype=np.int8) if there and form.factors else None

    return GroupQuantized(
        format=form,
        codes=bytes_without_nan((outputs, inputs))
        if form.levels is Levels.E4M3
        else draw.integers(0, 1 << form.bits, (outputs, inputs), dtype=np.uint8),
        scales=numbers(form.scales),
        minimums=numbers(ScaleType.FLOAT16) if form.minimums else None,
        factors=factors(True),
        minimum_factors=factors(form.minimums),
    )


def stored(*weights: GroupQuantized) -> StoredCodes:
    """Matrices that are there already, one below the other."""
    found = joined_codes([_stored(each) for each in weights])
    assert found is not None
    return found


def _stored(weight: GroupQuantized) -> StoredCodes:
    return stored_codes(weight.format, weight.shape, lambda: weight.rows)


def read(codes: StoredCodes) -> np.ndarray:
    """The values of all rows, [N, K] float32."""
    return np.concatenate([piece.values() for _, run in codes.runs for piece in codes.pieces(run)])
