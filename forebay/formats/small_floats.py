"""Floats of 4 and 8 bits: the numbers that their codes stand for.

E2M1 and E8M0: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1. E4M3: OCP 8-bit Floating Point 1.0, section 5.2,
which is torch's `float8_e4m3fn`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS: Final = 127
E8M0_LARGEST: Final = 252  # the product with the largest E2M1, 6, is finite in float32; 255 is NaN
E4M3_LARGEST: Final = 448.0
_MAGNITUDE: Final = 0x7F  # all bits but the sign, all of which are set in a NaN


def _e4m3() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents > 0, np.ldexp(8.0 + fractions, exponents - 10), np.ldexp(fractions, -9))
    magnitudes[codes & _MAGNITUDE == _MAGNITUDE] = np.nan
    numbers: npt.NDArray[np.float32] = np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)
    return numbers


E4M3: Final = _e4m3()


def has_nan(codes: npt.NDArray[Any]) -> bool:
    """Return whether any E4M3 code, uint8, is NaN."""
    return bool((codes & np.uint8(_MAGNITUDE) == _MAGNITUDE).any())
