"""Matrices of numbers to codes, for checkpoints that have none."""

from __future__ import annotations

import numpy as np

from forebay.formats.file_array import Array
from forebay.formats.held_format import QUANTIZED_FORMATS
from forebay.formats.quantized import F16, F32, GROUP, U8, CodeFormat, GroupQuantized, half
from forebay.formats.stored_tensor import as_float32


def quantize_rows(values: F32, bits: int) -> GroupQuantized:
    """values [N, K], K a multiple of `GROUP`, to the nearest code of 8 or 4 bits, in the format of `QUANTIZED_FORMATS`.

    8 bits as ggml's Q8_0: scale = largest |value| / 127. 4 bits as its Q4_1: minimum = least value, scale = (largest -
    least) / 15. Codes are nearest with scale and minimum as they were rounded to float16, neither ever -0.
    ModelError beyond float16.
    """
    num_rows, width = values.shape
    groups = values.reshape(num_rows, width // GROUP, GROUP)
    codes, scales, minimums = _in_8_bits(groups) if bits == 8 else _in_4_bits(groups)
    return GroupQuantized(
        format=QUANTIZED_FORMATS[bits], codes=codes.reshape(values.shape), scales=scales, minimums=minimums
    )


def unwritten(form: CodeFormat, num_rows: int, width: int) -> GroupQuantized:
    """Return a matrix [num_rows, width] of one of `QUANTIZED_FORMATS` whose arrays have no content yet."""
    scales, minimums = (np.empty((num_rows, width // GROUP), np.float16) for _ in range(2))
    codes = np.empty((num_rows, width), np.uint8)
    return GroupQuantized(format=form, codes=codes, scales=scales, minimums=minimums if form.minimums else None)


def quantize_into(values: Array, out: GroupQuantized, first: int) -> None:
    """Write `quantize_rows` of values [n, K] to rows `first`.. of `out`, which `unwritten` made. Values are float32,
    float16, or bits of bfloat16 as uint16."""
    rows = slice(first, first + len(values))
    made = quantize_rows(as_float32(values, bfloat16=values.dtype == np.uint16), out.format.bits)
    out.codes[rows], out.scales[rows] = made.codes, made.scales
    if out.minimums is not None and made.minimums is not None:
        out.minimums[rows] = made.minimums


def _in_8_bits(groups: F32) -> tuple[U8, F16, None]:
    scales = half(np.abs(groups).max(axis=-1) / 127)
    codes = _nearest(groups, scales).clip(-128, 127) + 128
    return codes.astype(np.uint8), scales, None


def _in_4_bits(groups: F32) -> tuple[U8, F16, F16]:
    # Of zeros of both signs, numpy returns another one on each CPU.
    least, largest = groups.min(axis=-1) + np.float32(0), groups.max(axis=-1) + np.float32(0)
    minimums = half(least)
    scales = half((largest - least) / 15)
    codes = _nearest(groups - minimums[..., None].astype(np.float32), scales).clip(0, 15)
    return codes.astype(np.uint8), scales, minimums


def _nearest(groups: F32, scales: F16) -> F32:
    """Return groups / scales as whole numbers; 0 if the scale is 0."""
    by_group = scales[..., None].astype(np.float32)
    return np.rint(np.divide(groups, by_group, out=np.zeros_like(groups), where=by_group != 0))
