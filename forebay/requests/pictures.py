"""Pictures of a prompt, on their way from the server to the engine."""

from __future__ import annotations

import msgspec


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of a prompt, decoded and cut into tiles of one size, which the model encodes one by one.

    `pixels` are uint8 [num_tiles, height, width, 3], red first. `digest` is the SHA-256 of them and of `grid`, the
    tiles' rows and columns as the model's type counts them. The picture's tokens stand in the prompt in `runs`, each a
    start and a length; there the prompt has the model's placeholder. Together they are as many as its encoding has
    rows, and come in the same order; each tile has equally many.
    """

    digest: bytes
    grid: tuple[int, int]
    num_tiles: int
    height: int
    width: int
    pixels: bytes
    runs: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.runs)
