"""Pictures of a prompt, on their way from the server to the engine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from forebay.base.pixels import Size
from forebay.memory.encodings import Encoding
from forebay.memory.pictures import Pictures
from forebay.memory.slots import Ids
from forebay.requests.rope_positions import GridRun, rope_delta, rope_positions


def digest_of(pixels: bytes, grid: tuple[int, int], sizes: Sequence[Size]) -> bytes:
    """Return the SHA-256 of a picture's pixels, followed by its grid and the sizes of its tiles."""
    digest = hashlib.sha256(pixels)
    digest.update(np.array([grid, *sizes], dtype="<u4").tobytes())
    return digest.digest()


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of a prompt, decoded and cut into tiles, which the model encodes one by one.

    Tiles have the `sizes` (height and width), and `pixels` are theirs one after another, each uint8 [height, width, 3],
    red first. `digest` is the SHA-256 of them, of `grid`, the tiles' rows and columns as the model's type counts them
    (with M-RoPE those of the tokens), and of the sizes. The places of the picture's tokens in the prompt are `runs`,
    each a start and a length; there the prompt has the model's placeholder. Their number is that of the encoding's
    rows, and they come in the same order.
    """

    digest: bytes
    grid: tuple[int, int]
    sizes: tuple[Size, ...]
    pixels: bytes
    runs: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.runs)


class Awaited(NamedTuple):
    """A tile of a prompt's picture, and the positions of its tokens, which ascend."""

    encoding: Encoding
    tile: int
    positions: Ids


class PromptPictures:
    """The pictures of a prompt that an engine knows, and the places of their tokens. A token at a picture's place takes
    a row of its encoding; the tile of that row must be encoded before, or in the same step.

    Shape letters: P tokens of pictures, in the order of the prompt.
    """

    def __init__(self, encodings: Sequence[Encoding], runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """`runs` are those of each picture."""
        self.encodings = encodings
        grids = (encoding.grid for encoding in encodings)
        self._grid_runs = sorted(GridRun(of[0][0], *grid) for of, grid in zip(runs, grids, strict=True))
        places = [np.concatenate([np.arange(at, at + count) for at, count in of]) for of in runs]
        positions = np.concatenate(places)
        order = np.argsort(positions)
        counts = [len(of) for of in places]
        self.positions: Ids = positions[order]  # [P]
        self._of: Ids = np.repeat(np.arange(len(places)), counts)[order]  # [P], which picture
        self._inside: Ids = np.concatenate([np.arange(count) for count in counts])[order]  # [P], which of its tokens
        tiles = (
            Awaited(encoding, number, of[tile.tokens])
            for encoding, of in zip(encodings, places, strict=True)
            for number, tile in enumerate(encoding.tiles)
        )
        self._tiles = sorted(tiles, key=lambda tile: int(tile.positions[0]))
        self._runs: Ids = np.array(sorted(run for of in runs for run in of), dtype=np.int64)  # [.., 2]

    def write_ids(self, tokens: array[int]) -> None:
        """Write the pictures' ids over the placeholders of the prompt."""
        firsts = np.array([encoding.first_id for encoding in self.encodings])
        np.frombuffer(tokens, dtype=np.int32)[self.positions] = firsts[self._of] + self._inside

    @property
    def rope_delta(self) -> int:
        """Return the addition to the place of a token behind the prompt, with M-RoPE: see `rope_positions`."""
        return rope_delta(self._grid_runs)

    def rope_positions(self, start: int, stop: int) -> Ids:
        """Return the rotary positions of tokens [start, stop) with M-RoPE, [3, stop - start]."""
        return rope_positions(self._grid_runs, start, stop)

    def awaited(self, start: int, pictures: Pictures) -> tuple[int, Encoding, int] | None:
        """Return the first position from `start` on whose tile is not planned to its end, and that tile; or None."""
        found: tuple[int, Encoding, int] | None = None
        for encoding, tile, positions in self._tiles:
            if found and positions[0] >= found[0]:
                break
            if positions[-1] >= start and not pictures.is_planned(encoding, tile):
                at = int(positions[np.searchsorted(positions, start)])
                found = (at, encoding, tile) if found is None or at < found[0] else found
        return found

    def needed(self, start: int) -> list[Encoding]:
        """Return the encodings, each once, from which tokens from `start` on take rows."""
        return list(dict.fromkeys(encoding for encoding, _, positions in self._tiles if positions[-1] >= start))

    def within(self, stop: int) -> list[Encoding]:
        """Return the encodings, each once, of which the first `stop` tokens of the prompt have some."""
        numbers = np.unique(self._of[: np.searchsorted(self.positions, stop)]).tolist()
        return list(dict.fromkeys(self.encodings[number] for number in numbers))

    def uncut(self, start: int, stop: int) -> int:
        """Return where a chunk [start, stop) ends so that it cuts no run of a picture's tokens: in front of the run, or
        behind it if the chunk begins inside."""
        firsts, lens = self._runs.T
        at = int(np.searchsorted(firsts, stop)) - 1
        if at < 0 or stop >= firsts[at] + lens[at]:
            return stop
        return int(firsts[at]) if firsts[at] > start else int(firsts[at] + lens[at])

    def limit(self, start: int, stop: int, pictures: Pictures) -> int:
        """Return where a chunk [start, stop) ends: in front of a token that has yet to be encoded, and as `uncut` says
        where attention within pictures is in both directions. `start` if there is no such chunk."""
        awaited = self.awaited(start, pictures)
        end = stop if awaited is None else min(stop, awaited[0])
        if end <= start or not pictures.config.longest_span:
            return end
        end = self.uncut(start, end)
        return start if awaited is not None and end > awaited[0] else end

    def spans(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Return the runs of pictures' tokens in a chunk that cuts none at its end: their first tokens, counted from
        the chunk's, and their lengths, without the tokens before the chunk."""
        firsts, ends = self._runs[:, 0], self._runs.sum(axis=1)
        inside = (firsts < stop) & (ends > start)
        begins = np.maximum(firsts[inside], start)
        return begins - start, ends[inside] - begins

    def rows(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Return which tokens of a chunk [start, stop) take rows of encodings, counted from its first, and which rows
        they take."""
        first, last = np.searchsorted(self.positions, (start, stop))
        rows = np.empty(last - first, dtype=np.int64)
        of, inside = self._of[first:last], self._inside[first:last]
        for number in np.unique(of).tolist():
            rows[of == number] = self.encodings[number].rows[inside[of == number]]
        return self.positions[first:last] - start, rows
