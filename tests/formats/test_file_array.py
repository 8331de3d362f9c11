"""Files of weights that change while they are read: a typed error, never SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.file_array import PIECE_BYTES, FileArray, WeightFile
from forebay.formats.stored_tensor import read_tensor
from tests.formats.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.models.tiny import shared_tiny

ROWS, WIDTH, OFFSET = 300, 1000, 24


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 30, (ROWS, WIDTH), np.int32)


@pytest.fixture
def array(tmp_path: Path, values: np.ndarray) -> FileArray:
    (tmp_path / "weights").write_bytes(bytes(OFFSET) + values.tobytes())
    return FileArray(WeightFile(tmp_path / "weights"), values.dtype, values.shape, OFFSET)


def test_file_array_pieces_are_all_rows_in_order_and_bounded(array: FileArray, values: np.ndarray) -> None:
    pieces = list(array.pieces())
    assert len(pieces) > 1
    assert all(piece.nbytes <= PIECE_BYTES for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), values)
    assert np.array_equal(array.read(), values)


@pytest.mark.parametrize(
    "order",
    [[], [7], range(300), range(250, 260), [5, 4, 3], [299, 0, 1, 2, 150, 150], range(0, 300, 2), range(0, 300, 7)],
    ids=str,
)
def test_file_array_take_gives_the_rows_of_any_order(array: FileArray, values: np.ndarray, order: list[int]) -> None:
    ids = np.array(order, np.int64)
    assert np.array_equal(array.take(ids), values[ids])


def test_file_array_part_and_reshape_locate_the_same_bytes(array: FileArray, values: np.ndarray) -> None:
    assert np.array_equal(array.reshape(3, 100, WIDTH).part(1, 2).read()[0], values[100:200])
    assert np.array_equal(array.part(10, 20).reshape(WIDTH, 10).read(), values[10:20].reshape(WIDTH, 10))


def test_weight_file_that_became_shorter_raises_with_both_sizes(array: FileArray, tmp_path: Path) -> None:
    size = (tmp_path / "weights").stat().st_size
    os.truncate(tmp_path / "weights", size // 2)
    assert array.part(0, 10).read().shape == (10, WIDTH)
    for read in (array.read, lambda: list(array.pieces()), lambda: array.take(np.array([ROWS - 1]))):
        with pytest.raises(ModelError, match=rf"has {size // 2} bytes and had {size} when it was opened"):
            read()


@pytest.mark.parametrize("kind", ["safetensors", "F32.gguf", "Q4_0.gguf"])
def test_checkpoint_shortened_after_it_was_opened_raises_for_each_tensor_cut_off(kind: str, tmp_path: Path) -> None:
    """Half of a page and less of the file is left: reading the rest of a mapped one would raise SIGBUS."""
    if kind == "safetensors":
        path = tmp_path
        for file in shared_tiny("llama").path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (file,) = tmp_path.glob("*.safetensors")
    else:
        file = path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kind.removesuffix(".gguf")))
    checkpoint = open_checkpoint(path)
    os.truncate(file, 100)
    for tensor in checkpoint.tensors.values():
        with pytest.raises(ModelError, match="another program has shortened it"):
            read_tensor(tensor)
