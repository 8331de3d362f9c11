"""Safetensors files: one, or several named by an index. The header is checked whole before a tensor is touched.

Layout: eight bytes of header length (little-endian), a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.formats.file_array import FileArray, WeightFile
from forebay.formats.files import MAX_JSON_BYTES, is_there, parse_json, read_large_json

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
ADAPTER_NAME: Final = "adapter_config.json"
ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
# Of one file and of a whole checkpoint. Published ones have up to 12,000 and 140,000.
MAX_TENSORS: Final = 1 << 16
MAX_CHECKPOINT_TENSORS: Final = 1 << 18
MAX_SHARDS: Final = 4096
_MAX_ENTRY_VALUES: Final = 16  # of a tensor's entry: its fields, four sizes, two offsets
MAX_DIMS: Final = 8
MAX_ELEMENTS: Final = 1 << 48

# BF16 is handed on as its bits: numpy has no such type.
DTYPES: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_PACKED: Final[dict[str, np.dtype[Any]]] = {
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """An entry of a safetensors header: where the tensor's bytes are and how to read them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the file
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file: `tensors` by name, and their values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = WeightFile(path)
        self.tensors = _read_header(self._file)

    def values(self, name: str) -> FileArray:
        """The tensor as float32, float16, or (BF16) uint16 bits, unread. ModelError for any other type."""
        tensor = self.tensors[name]
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} has dtype {tensor.dtype}; supported are {', '.join(DTYPES)}"
            )
        return FileArray(self._file, dtype, tensor.shape, tensor.offset)

    def packed(self, name: str) -> FileArray:
        """As `values`, also of integers that only their format can read."""
        tensor = self.tensors[name]
        dtype = _PACKED.get(tensor.dtype)
        return self.values(name) if dtype is None else FileArray(self._file, dtype, tensor.shape, tensor.offset)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the checkpoint in `folder`, each once; ModelError if there are none, or
    some are missing."""
    names = weight_files(folder)
    missing = [name for name in names if not is_there(folder / name)]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(names)} files of weights are missing, such as {missing[0]}: download "
            "them again (complete files are kept), or copy them there"
        )
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[str]:
    """Their names, as the index has them: they need not be there."""
    index = folder / INDEX_NAME
    if is_there(index):
        return _shard_names(index)
    if is_there(folder / SINGLE_NAME):
        return [SINGLE_NAME]
    if folder.is_file():
        raise ModelError(f"{folder}: only .gguf files and folders with config.json and .safetensors files are opened")
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such file or folder")
    raise ModelError(f"{folder}: {why_no_weights([entry.name for entry in folder.iterdir()])}")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has all files of its weights, not only a config.json."""
    if not is_there(folder / INDEX_NAME) and not is_there(folder / SINGLE_NAME):
        return False
    return all((folder / name).exists() for name in weight_files(folder))


def _shard_names(index: Path) -> list[str]:
    weight_map = read_large_json(index, most_values=2 * MAX_CHECKPOINT_TENSORS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: it has no weight_map")
    names = list(dict.fromkeys(weight_map.values())) if all(isinstance(v, str) for v in weight_map.values()) else [""]
    if len(names) > MAX_SHARDS or len(weight_map) > MAX_CHECKPOINT_TENSORS:
        counts = f"{len(weight_map)} tensors in {len(names)} files"
        raise ModelError(f"{index}: {counts}; at most {MAX_CHECKPOINT_TENSORS} in {MAX_SHARDS} are read")
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name or not name.isprintable():
            raise ModelError(f"{index}: {name!r} is not the plain name of a .safetensors file")
    return names


def why_no_weights(names: Iterable[str]) -> str:
    """Describe a folder or repository with files of these names, none of a checkpoint: what it is, and what to do."""
    names = sorted(names)
    if ADAPTER_NAME in names:
        return (
            "it is a LoRA adapter, which changes another model: serve that one with --enable-lora and --lora-modules "
            "NAME=PATH of this folder, or NAME=org/name of this repository"
        )
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    gguf = [name for name in names if name.endswith(".gguf")]
    tensors = [name for name in names if name.endswith(".safetensors")]
    if pickled and not gguf:
        return (
            f"the weights are pickled ({pickled[0]}), which can run code and is never opened: "
            "convert them to safetensors, or use a GGUF file"
        )
    if gguf:
        return f"no {SINGLE_NAME}; to serve a GGUF file name it itself: {gguf[0]}"
    if tensors:
        return f"there is {tensors[0]}, and neither {SINGLE_NAME} nor {INDEX_NAME}: copy the index there, or rename it"
    return f"no {SINGLE_NAME} and no {INDEX_NAME}: is the download complete?"


def _read_header(file: WeightFile) -> dict[str, SafetensorsTensor]:
    path, size = file.path, file.num_bytes
    length = int.from_bytes(file.read(0, 8), "little")
    if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
        raise ModelError(f"{path}: not a safetensors file: a header of {length} bytes in a file of {size}")
    text = file.read(8, length)
    # Each has an object of its own: counted before any of them is made.
    num_tensors = text.count(b"{") - 1
    if num_tensors > MAX_TENSORS:
        raise ModelError(f"{path}: about {num_tensors} tensors; at most {MAX_TENSORS} of one file are read")
    header = parse_json(text, f"{path} (header)", most_values=MAX_TENSORS * _MAX_ENTRY_VALUES)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = [_read_entry(path, name, entry, start) for name, entry in header.items()]
    _check_layout(path, tensors, start, size)
    return {tensor.name: tensor for tensor in tensors}


def _read_entry(path: Path, name: str, entry: Any, start: int) -> SafetensorsTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ModelError(f"{where} is not described by an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ModelError(f"{where} has the unknown dtype {brief(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS or math.prod(shape) > MAX_ELEMENTS:
        raise ModelError(f"{where} has the impossible shape {str(shape)[:80]}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{where} has the impossible data_offsets {str(offsets)[:80]}")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelError(f"{where} needs {num_bytes} bytes for {dtype} {shape} and has {offsets[1] - offsets[0]}")
    return SafetensorsTensor(name, tuple(shape), dtype, start + offsets[0], num_bytes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value)


def _check_layout(path: Path, tensors: list[SafetensorsTensor], start: int, size: int) -> None:
    """Tensors follow each other without gap or overlap and end with the file."""
    expected = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != expected:
            raise ModelError(f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset} instead of {expected}")
        expected += tensor.num_bytes
    if expected != size:
        raise ModelError(
            f"{path}: the tensors end at byte {expected} and the file at {size}: is the download complete?"
        )
