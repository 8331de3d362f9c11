"""Another checkpoint of the same model, for the comparison of answers before and after weights change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

import numpy as np

from forebay.base.errors import ConfigError
from forebay.base.units import human_bytes
from forebay.formats.gguf_parts import model_file
from forebay.formats.safetensors import DTYPES, SafetensorsFile, SafetensorsTensor, checkpoint_files
from forebay.formats.stored_tensor import as_float32

_NORM: Final = "norm"  # in the names of all weights of norms
_ADDED: Final = 0.5  # to every second weight of a norm


@contextmanager
def other_weights(model_path: Path) -> Iterator[Path]:
    """Make a checkpoint whose norms of one file differ, in a folder that is there meanwhile. Its other files are links.

    Raises ConfigError for a model without such a file of safetensors, and if there is no room for a copy of it."""
    if not model_file(model_path).is_dir():
        raise ConfigError("other weights are made of safetensors files alone, and this model is a GGUF file")
    found, norms = _with_norms(model_path)
    size, room = found.stat().st_size, shutil.disk_usage(gettempdir()).free
    if 2 * size > room:
        raise ConfigError(f"{gettempdir()} has no room for a copy of {human_bytes(size)}: {human_bytes(room)} are free")
    with TemporaryDirectory(prefix="forebay-weights-") as root:
        folder = Path(root)
        for path in model_path.iterdir():
            if path.name != found.name:
                (folder / path.name).symlink_to(path.resolve())
        shutil.copyfile(found, folder / found.name)
        _change(folder / found.name, norms)
        yield folder


def _with_norms(model_path: Path) -> tuple[Path, list[SafetensorsTensor]]:
    for path in checkpoint_files(model_path):
        tensors = SafetensorsFile(path).tensors.values()
        norms = [each for each in tensors if _NORM in each.name and len(each.shape) == 1 and each.dtype in DTYPES]
        if norms:
            return path, norms
    raise ConfigError("no weight of this model has a name of a norm, which other weights would differ in")


def _change(path: Path, tensors: list[SafetensorsTensor]) -> None:
    with path.open("r+b") as file:
        for tensor in tensors:
            file.seek(tensor.offset)
            stored = np.frombuffer(file.read(tensor.num_bytes), DTYPES[tensor.dtype])
            is_bits = stored.dtype == np.uint16  # of bfloat16
            values = as_float32(stored, bfloat16=is_bits).copy()
            values[::2] += _ADDED
            changed = values.view(np.uint32) >> 16 if is_bits else values
            file.seek(tensor.offset)
            file.write(changed.astype(stored.dtype).tobytes())
