"""The layout of a scan's state where scans are computed in chunks: the state as it was when the open chunk began, and
what the chunk's tokens have brought since.

Chunks begin at positions of the sequence that are multiples of CHUNK. A row has parts, each with a place for the CHUNK
tokens that a chunk may have; see decision 68.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

CHUNK: Final = 16  # tokens: the rows that one instruction of a matrix unit takes
_ALIGNMENT: Final = 64  # bytes: loads of 16 bytes, and strides that Triton finds to be multiples of 16


def part_offsets(num_bytes: int, token_bytes: Iterable[int]) -> Sequence[int]:
    """Return the offsets, in bytes, of the parts behind `num_bytes` of a state, and then the length of a row.

    `token_bytes`: what each part keeps of a token.
    """
    offsets = [_aligned(num_bytes)]
    for each in token_bytes:
        offsets.append(offsets[-1] + _aligned(CHUNK * each))
    return offsets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
