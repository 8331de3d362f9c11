"""Encodings of pictures: slices in their order, rows that nobody else writes, memory that is taken again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.models.encoder import load_encoder
from forebay.models.encoders.encoder import Encoder
from forebay.requests.step_plan import Encode, PictureWork
from forebay.runtime.steps.pictures import Encodings, UnfinishedTile
from tests.models.visual import NUM_LAYERS, VisualModel, shared_visual
from tests.runtime.plans import ids

NUM_ROWS = 12
PER_TILE = 4


@pytest.fixture(scope="module")
def model() -> VisualModel:
    return shared_visual("smolvlm")


@pytest.fixture(scope="module")
def encoder(model: VisualModel) -> Encoder:
    checkpoint, ops = open_checkpoint(model.path), make_ops("torch", 1)
    return load_encoder(checkpoint, ops=ops, dtype=torch.float32, progress=lambda done, total: None)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pixels(seed: int, side: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8).tobytes()


def slices(model: VisualModel, cuts: list[int], *, tile: int = 0, seed: int = 0, first_row: int = 1) -> list[Encode]:
    """The work on a tile, cut at these layers; its rows begin at `first_row`."""
    found, ((side, _),) = [], model.tile_sizes
    for first, last in zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True):
        found.append(
            Encode(
                picture=7,
                tile=tile,
                first_layer=first,
                last_layer=last,
                height=side,
                width=side,
                pixels=b"" if first else pixels(seed, side),
                rows=ids(range(first_row, first_row + PER_TILE)) if last == NUM_LAYERS else ids([]),
            )
        )
    return found


def encoded(encoder: Encoder, model: VisualModel, seed: int = 0) -> torch.Tensor:
    ((side, _),) = model.tile_sizes
    tile = torch.from_numpy(np.frombuffer(pixels(seed, side), np.uint8).copy())
    state = encoder.begin(tile.view(side, side, 3))
    return encoder.finish(encoder.layers(state, 0, encoder.num_layers))


def test_slices_of_two_tiles_in_turns_write_the_rows_of_each_and_no_others(
    model: VisualModel, encoder: Encoder
) -> None:
    encodings = Encodings(encoder, NUM_ROWS)
    first, second = slices(model, [1, 2]), slices(model, [2], tile=1, seed=1, first_row=9)
    for encode in (first[0], second[0], first[1], first[2], second[1]):
        encodings.encode(PictureWork(encodes=(encode,)))
    assert torch.equal(encodings.rows[1:5], encoded(encoder, model))
    assert torch.equal(encodings.rows[9:13], encoded(encoder, model, seed=1))
    assert not encodings.rows[[0, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 1, 1], [1, 0]])
def test_a_slice_that_does_not_follow_is_refused(model: VisualModel, encoder: Encoder, order: list[int]) -> None:
    encodings, cut = Encodings(encoder, NUM_ROWS), slices(model, [1, 2])
    with pytest.raises(UnfinishedTile):
        encodings.encode(PictureWork(encodes=tuple(cut[i] for i in order)))
    assert not encodings.rows.any()


def test_dropped_work_is_forgotten_and_begins_anew(model: VisualModel, encoder: Encoder) -> None:
    encodings, cut = Encodings(encoder, NUM_ROWS), slices(model, [1])
    encodings.encode(PictureWork(encodes=(cut[0],)))
    with pytest.raises(UnfinishedTile):
        encodings.encode(PictureWork(drops=(7,), encodes=(cut[1],)))
    encodings.encode(PictureWork(encodes=tuple(cut)))
    assert torch.equal(encodings.rows[1:5], encoded(encoder, model))


def test_memory_that_is_taken_again_has_no_work_and_an_empty_padding_row(model: VisualModel, encoder: Encoder) -> None:
    encodings, cut = Encodings(encoder, NUM_ROWS), slices(model, [1])
    encodings.encode(PictureWork(encodes=(cut[0],)))
    encodings.rows.fill_(1.0)  # as a GPU's memory may come back
    encodings.reset()
    assert not encodings.rows[0].any()
    with pytest.raises(UnfinishedTile):
        encodings.encode(PictureWork(encodes=(cut[1],)))
