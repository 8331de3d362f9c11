"""The form in which a matrix is held, by its form in the file and the requested one."""

from __future__ import annotations

from typing import Final

from forebay.formats.quantization import Quantization
from forebay.formats.quantized import ENCODER_BITS, GROUP, CodeFormat

QUANTIZED_BITS: Final = {Quantization.INT8: 8, Quantization.INT4: 4}
# What `quantize_rows` makes, by bits.
QUANTIZED_FORMATS: Final = {
    8: CodeFormat(bits=8, minimums=False),
    4: CodeFormat(bits=4, minimums=True),
}


def held_format(
    quantization: Quantization, own: CodeFormat | None, *, in_features: int, min_bits: int
) -> CodeFormat | None:
    """Return the format that holds a matrix which the file has in `own` codes; None for the model's dtype.

    `min_bits` are the fewest that it can do with: 4, 8, `ENCODER_BITS`, or 16 for the model's dtype. Codes of no more
    bits than are asked for stay as they are.
    """
    if quantization is Quantization.NONE or min_bits > ENCODER_BITS or in_features % GROUP:
        return None
    if quantization is Quantization.FILE:
        return own
    bits = max(min_bits, QUANTIZED_BITS[quantization])
    return own if own is not None and own.bits <= bits else QUANTIZED_FORMATS.get(bits)
