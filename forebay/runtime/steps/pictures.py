"""Encodings of pictures on the device, and the encoder's work on them.

Shape letters: R rows of encodings, padding included; H numbers of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forebay.models.encoders.encoder import Encoder, State
from forebay.pools.regions import Take
from forebay.pools.table import Column, Table
from forebay.requests.step_plan import Encode, PictureWork


class UnfinishedTile(Exception):
    """A slice does not follow the slices that were done of its tile: a bug of ours."""


class Encodings:
    """Rows 1..`num_rows` of encodings, row 0 is padding; and the encoder's intermediate state of unfinished tiles.

    The table is in the memory that `take` gives. The last slice of a tile writes its rows, all at once; they are not
    read before. `bidirectional`: the model's attention within a picture is in both directions.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_rows: int,
        *,
        bidirectional: bool = False,
        device: torch.device | str = "cpu",
        take: Take | None = None,
    ) -> None:
        self.bidirectional = bidirectional
        self.num_rows, self.encoder, self._device = num_rows, encoder, device
        columns = {"rows": Column(encoder.dtype, (encoder.row_size,), pad=0.0)}
        self._table = Table(1 + num_rows, columns=columns, device=device, take=take)
        self._unfinished: dict[tuple[int, int], tuple[int, State]] = {}  # by picture and tile: layers done, state

    @property
    def rows(self) -> Tensor:
        """[R, H] in the encoder's type."""
        return self._table["rows"]

    def encode(self, work: PictureWork) -> None:
        """Forget unfinished work on dropped pictures, then do the slices in their order."""
        if work.drops:
            self._unfinished = {key: done for key, done in self._unfinished.items() if key[0] not in work.drops}
        for encode in work.encodes:
            self._slice(encode)

    def _slice(self, encode: Encode) -> None:
        key = encode.picture, encode.tile
        if encode.first_layer == 0:
            state = self.encoder.begin(self._pixels(encode))
        else:
            state = self._resumed(key, encode.first_layer)
        state = self.encoder.layers(state, encode.first_layer, encode.last_layer)
        if encode.last_layer < self.encoder.num_layers:
            self._unfinished[key] = encode.last_layer, state
            return
        at = torch.from_numpy(encode.rows.copy()).to(self._device)
        self.rows.index_copy_(0, at, self.encoder.finish(state))

    def _resumed(self, key: tuple[int, int], layer: int) -> State:
        if (unfinished := self._unfinished.pop(key, None)) is None or unfinished[0] != layer:
            done = unfinished[0] if unfinished else 0
            raise UnfinishedTile(f"tile {key} has {done} layers done, and its next slice begins with layer {layer}")
        return unfinished[1]

    def _pixels(self, encode: Encode) -> Tensor:
        pixels = np.frombuffer(encode.pixels, np.uint8).reshape(encode.height, encode.width, 3)
        return torch.from_numpy(pixels.copy()).to(self._device)

    def reset(self) -> None:
        """Forget everything: the memory is new."""
        self._unfinished.clear()
        self._table.reset_padding()
