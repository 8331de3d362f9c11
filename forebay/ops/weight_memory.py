"""Memory for weights, side by side in large pieces.

A step reads all weights, one after the other. In pages of 4 KiB a core then waits for the look-up of each, and what it
fetches ahead by itself ends with the page: one thread took 3.0 ms for the layers of a 135M model in 4 bits, now 2.0.
Most weights are smaller than a large page, so they can lie in such only together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
LINE: Final = 64  # bytes: a group's codes would otherwise straddle one line more


def _of_torch(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class WeightMemory:
    """Hands out bytes that begin on a cache line, from chunks that `take_chunk` makes: [bytes] uint8, each beginning on
    a line. None: from torch, and nothing of it can be had again."""

    def __init__(self, take_chunk: Callable[[int], Tensor] | None = None) -> None:
        self._take_chunk = take_chunk or _of_torch
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._taken: list[Tensor] | None = None if take_chunk is None else []
        self._again: Iterator[Tensor] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, whoever takes the same sizes in the same order is given the same places. AssertionError where they
        are others, or fewer."""
        assert self._taken is not None, "memory of torch is not had again"
        self._again = iter(self._taken)
        try:
            yield
            assert next(self._again, None) is None, "fewer weights were taken than before"
        finally:
            self._again = None

    def take(self, size: int) -> Tensor:
        """`size` bytes, not initialized."""
        if self._again is not None:
            piece = next(self._again, None)
            assert piece is not None, "more weights are taken than before"
            assert len(piece) == size, f"a weight of {size} bytes in the place of one of {len(piece)}"
            return piece
        if size > len(self._chunk):
            self._chunk = self._take_chunk(max(size, CHUNK_BYTES))
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // LINE) * LINE :]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def placed(self, values: Tensor) -> Tensor:
        """A copy."""
        return self.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
