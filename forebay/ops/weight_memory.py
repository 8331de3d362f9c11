"""Memory for weights, side by side in large pieces.

A step reads all weights, one after the other. In pages of 4 KiB a core then waits for the look-up of each, and what it
fetches ahead by itself ends with the page: one thread took 3.0 ms for the layers of a 135M model in 4 bits, now 2.0.
Most weights are smaller than a large page, so they can lie in such only together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
LINE: Final = 64  # bytes: a group's codes would otherwise straddle one line more


class OtherPieces(Exception):
    """The pieces that a load packs differ from those that are there already."""


def _of_torch(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class WeightMemory:
    """Hands out bytes that begin on a cache line, from chunks that `take_chunk` makes: [bytes] uint8, each beginning on
    a line. None: from torch, and nothing of it can be had again.

    `filled`: whether what `take_packed` hands out has its content already, so that the caller writes none.
    """

    def __init__(self, take_chunk: Callable[[int], Tensor] | None = None) -> None:
        self._take_chunk = take_chunk or _of_torch
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._is_reusable = take_chunk is not None
        self._taken: list[Tensor] = []
        self._packed: list[Tensor] = []
        self._again: Iterator[Tensor] | None = None
        self._there: Iterator[Tensor] | None = None
        self.filled = False

    @property
    def packed(self) -> Sequence[Tensor]:
        """The pieces of `take_packed`, in order."""
        return self._packed

    @contextmanager
    def again(self, *, filled: bool = False) -> Iterator[None]:
        """Inside, requests of the same sizes in the same order get the same places; `filled` if packed weights need not
        be written. AssertionError if sizes differ, or fewer are requested."""
        assert self._is_reusable, "memory of torch is not had again"
        self._again, self.filled = iter(self._taken), filled
        try:
            yield
            assert next(self._again, None) is None, "fewer weights were taken than before"
        finally:
            self._again, self.filled = None, False

    @contextmanager
    def holding(self, pieces: Sequence[Tensor]) -> Iterator[None]:
        """Inside, `take_packed` hands out these pieces, which have their content. Raises OtherPieces if other sizes are
        taken; nothing that was taken inside is then reused."""
        before = len(self._taken), len(self._packed)
        self._there, self.filled = iter(pieces), True
        try:
            yield
            if next(self._there, None) is not None:
                raise OtherPieces("fewer weights are packed than are there")
        except BaseException:
            del self._taken[before[0] :], self._packed[before[1] :]
            raise
        finally:
            self._there, self.filled = None, False

    def take(self, size: int) -> Tensor:
        """`size` bytes, not initialized."""
        if self._again is not None:
            return self._next_again(size)
        if size > len(self._chunk):
            self._chunk = self._take_chunk(max(size, CHUNK_BYTES))
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // LINE) * LINE :]
        return self._kept(taken)

    def take_packed(self, size: int) -> Tensor:
        """`size` bytes for a weight in the kernels' packed format: with its content where `filled` says so."""
        if self._there is None or self._again is not None:
            piece = self.take(size)
        else:
            found = next(self._there, None)
            if found is None or len(found) != size:
                stored = "none" if found is None else len(found)
                raise OtherPieces(f"a weight is packed in {size} bytes, and {stored} are there")
            piece = self._kept(found)
        if self._is_reusable and self._again is None:
            self._packed.append(piece)
        return piece

    def placed(self, values: Tensor) -> Tensor:
        """A copy."""
        return self.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)

    def _next_again(self, size: int) -> Tensor:
        assert self._again is not None
        piece = next(self._again, None)
        assert piece is not None, "more weights are taken than before"
        assert len(piece) == size, f"a weight of {size} bytes in the place of one of {len(piece)}"
        return piece

    def _kept(self, taken: Tensor) -> Tensor:
        if self._is_reusable:
            self._taken.append(taken)
        return taken
