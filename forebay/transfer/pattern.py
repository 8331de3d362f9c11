"""A test pattern through every region between two engines, which shows whether each byte arrives at its place.

Both sides compute it from the position, so each knows the expected bytes; no request uses the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from forebay.requests.pieces import KindShape, Piece, extents, pieces
from forebay.requests.transfers import Span
from forebay.transfer.wire.memory import U8, Memory

MAX_REPORTED: Final = 8  # regions that hold something else


class Pattern:
    """A test pattern of `num_tokens` tokens in `spans`; `columns` are the lines of `Layout`."""

    def __init__(
        self,
        shapes: Mapping[str, KindShape],
        memory: Memory,
        columns: Sequence[str],
        spans: Mapping[str, Span],
        num_tokens: int,
    ) -> None:
        self._shapes, self._memory, self._spans = shapes, memory, spans
        self._extents = extents(shapes, spans, num_tokens)
        self._columns = {kind: [line for line in columns if line.startswith(f"{kind} ")] for kind in spans}

    @property
    def num_bytes(self) -> int:
        return sum((end - first) * sum(self._shapes[k].bytes_per_place) for k, (first, end) in self._extents.items())

    def write(self) -> None:
        """Write the pattern to the places."""
        for piece in self._pieces():
            self._memory.scatter(piece, self._data(piece))

    def clear(self) -> None:
        """Write zeros to the places."""
        for piece in self._pieces():
            self._memory.scatter(piece, np.zeros(self._memory.num_bytes(piece), dtype=np.uint8))

    def wrong(self) -> list[str]:
        """Describe the first regions with other bytes: the position of the first difference, the expected and the found
        value."""
        found: dict[str, str] = {}
        for piece in self._pieces():
            data = self._data(piece)
            here = self._memory.gather(piece, self._memory.staging(len(data)))
            column = self._columns[piece.kind][piece.region]
            if column not in found and len(found) < MAX_REPORTED and not np.array_equal(here, data):
                at = int(np.argmax(here != data))
                position = piece.first + at // self._shapes[piece.kind].bytes_per_place[piece.region]
                found[column] = f"{column}: at position {position} {data[at]:#04x} was sent and {here[at]:#04x} came"
        return [*found.values()]

    def _pieces(self) -> Iterator[Piece]:
        """Each of one region."""
        for kind, span in self._spans.items():
            for whole in pieces(kind, self._shapes[kind], span, *self._extents[kind]):
                for i in range(whole.num_regions):
                    yield whole._replace(region=whole.region + i, num_regions=1)

    def _data(self, piece: Piece) -> U8:
        bits = np.random.SFC64(np.random.SeedSequence([piece.region, piece.first, *piece.kind.encode()]))
        data = np.random.Generator(bits).bytes(self._memory.num_bytes(piece))
        return np.frombuffer(data, dtype=np.uint8)
