"""Sizes from the headers of image files, without a decoder."""

from __future__ import annotations

from typing import Final

_VP8X_SIZE: Final = 24  # offsets in the file
_VP8L_SIZE: Final = 21
_VP8_SIZE: Final = 26
_HEADER_BYTES: Final = 30


def webp_size(content: bytes) -> tuple[int, int] | None:
    """Return the width and height of a WebP file; None for another file, or one that is too short.

    RFC 9649, sections 2.5 to 2.7.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < _HEADER_BYTES:
        return None
    match content[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(content[at : at + 3], "little") for at in (_VP8X_SIZE, _VP8X_SIZE + 3))
            return width + 1, height + 1
        case b"VP8L":
            bits = int.from_bytes(content[_VP8L_SIZE : _VP8L_SIZE + 4], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (int.from_bytes(content[at : at + 2], "little") for at in (_VP8_SIZE, _VP8_SIZE + 2))
            return width & 0x3FFF, height & 0x3FFF
    return None
