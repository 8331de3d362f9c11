"""Weights that stay in the codes of their file, in groups along the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

GROUP: Final = 32  # inputs that share a scale


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupQuantized:
    """A matrix [N, K], K a multiple of `GROUP`: scale * (code - zero) + minimum, group by group along K.

    `bits` 8: codes [N, K] uint8. `bits` 4: codes [N, K // 2] uint8, where byte j of a group's 16 has element j in its low
    half and element j + 16 in its high half, as ggml's Q4_0 and Q4_1 have them. `scales` and `minimums` [N, K // GROUP]
    float16; `minimums` None where all are 0. So Q4_1 (zero 0), Q4_0 (zero 8, no minimums) and Q8_0 (zero 128, no minimums)
    are held without loss.
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
