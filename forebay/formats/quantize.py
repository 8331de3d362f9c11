"""Matrices of numbers to codes, for checkpoints that have none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.quantized import GROUP, QUANTIZED_FORMATS, GroupQuantized

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


def quantize_rows(values: F32, bits: int) -> GroupQuantized:
    """values [N, K], K a multiple of `GROUP`, to the nearest code of 8 or 4 bits, in the format of `QUANTIZED_FORMATS`.

    8 bits as ggml's Q8_0: scale = largest |value| / 127. 4 bits as its Q4_1: minimum = least value, scale = (largest -
    least) / 15. Codes are nearest with scale and minimum as they were rounded to float16. ModelError beyond float16.
    """
    num_rows, width = values.shape
    groups = values.reshape(num_rows, width // GROUP, GROUP)
    codes, scales, minimums = _in_8_bits(groups) if bits == 8 else _in_4_bits(groups)
    form = QUANTIZED_FORMATS[bits]
    return GroupQuantized(bits=bits, zero=form.zero, codes=codes, scales=scales, minimums=minimums)


def _in_8_bits(groups: F32) -> tuple[U8, F16, None]:
    scales = _half(np.abs(groups).max(axis=-1) / 127)
    codes = _nearest(groups, scales).clip(-128, 127) + 128
    return codes.astype(np.uint8).reshape(len(groups), groups.shape[1] * GROUP), scales, None


def _in_4_bits(groups: F32) -> tuple[U8, F16, F16]:
    least = groups.min(axis=-1)
    minimums = _half(least)
    scales = _half((groups.max(axis=-1) - least) / 15)
    codes = _nearest(groups - minimums[..., None].astype(np.float32), scales).clip(0, 15).astype(np.uint8)
    packed: U8 = codes[..., : GROUP // 2] | np.left_shift(codes[..., GROUP // 2 :], np.uint8(4))
    return packed.reshape(len(groups), groups.shape[1] * GROUP // 2), scales, minimums


def _nearest(groups: F32, scales: F16) -> F32:
    """groups / scales as whole numbers; 0 where the scale is."""
    by_group = scales[..., None].astype(np.float32)
    return np.rint(np.divide(groups, by_group, out=np.zeros_like(groups), where=by_group != 0))


def _half(values: F32) -> F16:
    if not (np.abs(values) <= np.finfo(np.float16).max).all():
        raise ModelError("a weight is not finite or beyond float16 once quantized: use --quantization none")
    return values.astype(np.float16)
