"""A bounded reader of GGUF models (versions 2 and 3, little-endian), of one file or of several parts.

Every size, offset, count and type is compared with the remaining bytes of the file before anything is allocated or
read, so a hostile file ends in a ModelError. The layout is that of ggml's `docs/gguf.md`; the `gguf` package's own
reader is not used because it trusts the file and takes seconds where this one takes tens of milliseconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError, brief
from forebay.formats.file_array import FileArray, WeightFile
from forebay.formats.gguf_blocks import BlockType
from forebay.formats.gguf_parts import check_parts, existing_parts
from forebay.formats.gguf_types import GGML_TYPES
from forebay.formats.strings import Strings

MAGIC: Final = b"GGUF"
MAX_KEY_BYTES: Final = 1 << 16  # the format's own limit
MAX_DIMS: Final = 4
MAX_ELEMENTS: Final = 1 << 48  # far above any tensor, far below where a product of four dimensions could overflow
MAX_ALIGNMENT: Final = 1 << 16
# Of all parts of a model. What published ones have is a few times less: 2,000 tensors, 60 entries, 16 MB of them, 0.8
# million strings.
MAX_TENSORS: Final = 1 << 16
MAX_ENTRIES: Final = 1 << 12
MAX_METADATA_BYTES: Final = 64 << 20
MAX_STRINGS: Final = 1_500_000

_SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),  # bool
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_MIN_METADATA_BYTES: Final = 8 + 4 + 1  # key length, type, the smallest value
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8  # name length, dimensions, one of them, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is in the order of numpy and safetensors: outermost first, the reverse of what the file holds."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF model: `metadata`, `tensors` by name, and their bytes. `path` may be any of its parts.

    Metadata is that of the first part. Its values are int, float, bool, str, and for lists `Strings`
    (`tokenizer.ggml.tokens`, `.merges`) and numpy arrays (`tokenizer.ggml.token_type`, `.scores`).
    """

    def __init__(self, path: Path) -> None:
        paths = existing_parts(path)
        limits = _Limits(MAX_METADATA_BYTES, MAX_STRINGS, MAX_TENSORS, MAX_ENTRIES)
        parts = [_Part(part, limits) for part in paths]
        check_parts(paths, [part.metadata for part in parts], sum(len(part.tensors) for part in parts))
        self.path = paths[0]
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._files: dict[str, WeightFile] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise ModelError(
                        f"{part.file.path}: the tensor {name!r} is in {self._files[name].path.name} as well"
                    )
                self.tensors[name], self._files[name] = tensor, part.file

    def raw(self, name: str) -> FileArray:
        """The bytes of a tensor, `[rows, bytes per row]`, a row being its innermost dimension."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return FileArray(self._files[name], np.dtype(np.uint8), (rows, tensor.num_bytes // rows), tensor.offset)


class _Part:
    """One file."""

    def __init__(self, path: Path, limits: _Limits) -> None:
        self.file = WeightFile(path)
        cursor = _Cursor(self.file, limits)
        num_tensors, num_entries = _read_preamble(cursor)
        self.metadata = _read_metadata(cursor, num_entries)
        self.tensors = _read_tensors(cursor, num_tensors, self.metadata)
        limits.num_bytes -= cursor.offset


@dataclass(slots=True)
class _Limits:
    """Bounds of the parts that are not read yet."""

    num_bytes: int
    num_strings: int
    num_tensors: int
    num_entries: int


class _Cursor:
    """Reads forward through the beginning of a file; every read checks first that the bytes are there."""

    def __init__(self, file: WeightFile, limits: _Limits) -> None:
        self._file, self.path, self.limits = file, file.path, limits
        self.size = min(file.num_bytes, limits.num_bytes)  # of what is read through here; weights are not
        self.buffer = file.read(0, min(self.size, _FIRST_BYTES))
        self.offset = 0

    @property
    def file_bytes(self) -> int:
        return self._file.num_bytes

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a sound GGUF file: {what} (at byte {self.offset} of {self.file_bytes})")

    def need(self, count: int, item_bytes: int, what: str) -> None:
        left = self.size - self.offset
        if count * item_bytes > left:
            raise self.fail(f"{what}: {count} x {item_bytes} bytes are declared and {left} are left")
        self._fetch(self.offset + count * item_bytes)

    def _fetch(self, end: int) -> None:
        """Have the file's first `end` bytes in the buffer, which grows at least to the double."""
        if end > len(self.buffer):
            have = len(self.buffer)
            self.buffer += self._file.read(have, min(max(end, 2 * have), self.size) - have)

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        self.need(1, layout.size, what)
        values = layout.unpack_from(self.buffer, self.offset)
        self.offset += layout.size
        return values

    def string(self, what: str, limit: int = MAX_ELEMENTS) -> str:
        (length,) = self.unpack(_U64, what)
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        self.need(length, 1, what)
        data = self.buffer[self.offset : self.offset + length]
        self.offset += length
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> Strings:
        """`count` strings, of which a tokenizer has a hundred thousand."""
        self.need(count, 8, what)
        self.limits.num_strings -= count
        if self.limits.num_strings < 0:
            raise self.fail(f"{what}: with its {count} there are more than {MAX_STRINGS} strings")
        try:
            return Strings(self._pieces(count, what))
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: an entry is not UTF-8") from error

    def _pieces(self, count: int, what: str) -> Iterator[bytes]:
        """Each is gone before the next is there: a list of all would leave holes in the heap when it goes."""
        offset, size, unpack = self.offset, self.size, _U64.unpack_from
        buffer, have = self.buffer, len(self.buffer)
        for _ in range(count):
            start = offset + 8
            if start > have:
                if start > size:
                    raise self.fail(f"{what}: the file ends inside it")
                self._fetch(start)
                buffer, have = self.buffer, len(self.buffer)
            offset = start + unpack(buffer, offset)[0]
            if offset > have:
                if offset > size:
                    raise self.fail(f"{what}: an entry runs past the end of the file")
                self._fetch(offset)
                buffer, have = self.buffer, len(self.buffer)
            yield buffer[start:offset]
        self.offset = offset

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> npt.NDArray[Any]:
        self.need(count, dtype.itemsize, what)
        values = np.frombuffer(self.buffer, dtype, count, self.offset).copy()
        self.offset += count * dtype.itemsize
        return values


_FIRST_BYTES: Final = 1 << 20
_U64: Final = struct.Struct("<Q")
_PREAMBLE: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_ARRAY_HEADER: Final = struct.Struct("<IQ")
_TENSOR_TAIL: Final = struct.Struct("<IQ")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic, version, num_tensors, num_entries = cursor.unpack(_PREAMBLE, "the header")
    if magic != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path}: GGUF version {version} is not supported, only 2 and 3, little-endian")
    limits = cursor.limits
    limits.num_entries -= num_entries
    limits.num_tensors -= num_tensors
    if limits.num_entries < 0 or limits.num_tensors < 0:
        counts = f"{num_tensors} tensors and {num_entries} entries of metadata are declared"
        raise cursor.fail(f"{counts}; at most {MAX_TENSORS} and {MAX_ENTRIES} are read of a model")
    cursor.need(num_entries, _MIN_METADATA_BYTES, "the metadata")
    cursor.need(num_tensors, _MIN_TENSOR_BYTES, "the tensor list")
    return num_tensors, num_entries


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"the metadata key {key!r} occurs twice")
        (value_type,) = cursor.unpack(_U32, key)
        metadata[key] = _read_value(cursor, key, value_type)
    return metadata


def _read_value(cursor: _Cursor, key: str, value_type: int) -> Any:
    if value_type == _STRING:
        return cursor.string(key)
    if value_type == _ARRAY:
        item_type, count = cursor.unpack(_ARRAY_HEADER, key)
        if item_type == _STRING:
            return cursor.strings(count, key)
        return _read_numbers(cursor, key, item_type, count)
    return _read_numbers(cursor, key, value_type, 1)[0].item()


def _read_numbers(cursor: _Cursor, key: str, value_type: int, count: int) -> npt.NDArray[Any]:
    if value_type not in _SCALARS:
        raise cursor.fail(f"{key!r} has the value type {value_type}, which is not supported here")
    values = cursor.numbers(_SCALARS[value_type], count, key)
    return values.astype(np.bool_) if value_type == _BOOL else values


def _read_tensors(cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    declared = [_read_tensor(cursor) for _ in range(num_tensors)]
    data_start = _data_start(cursor, metadata)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, block, relative in declared:
        num_bytes = math.prod(shape) // block.elements * block.num_bytes
        offset = data_start + relative
        if offset + num_bytes > cursor.file_bytes:
            raise cursor.fail(f"tensor {name!r} needs bytes {offset}..{offset + num_bytes}: is the download complete?")
        if name in tensors:
            raise cursor.fail(f"the tensor {name!r} occurs twice")
        tensors[name] = GgufTensor(name, shape, block, offset, num_bytes)
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = cursor.string("a tensor name", MAX_KEY_BYTES)
    (num_dims,) = cursor.unpack(_U32, name)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are possible")
    dims = cursor.unpack(struct.Struct(f"<{num_dims}Q"), name)
    type_id, relative = cursor.unpack(_TENSOR_TAIL, name)
    block = GGML_TYPES.get(type_id)
    if block is None:
        supported = ", ".join(known.name for known in GGML_TYPES.values())
        raise ModelError(f"{cursor.path}: tensor {name!r} has ggml type {type_id}; supported are {supported}")
    if not 1 <= math.prod(dims) <= MAX_ELEMENTS or dims[0] % block.elements:
        raise cursor.fail(f"tensor {name!r} has the shape {dims}, impossible for blocks of {block.elements}")
    return name, tuple(reversed(dims)), block, relative


def _data_start(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {brief(alignment)}, not a power of two up to {MAX_ALIGNMENT}")
    return -(-cursor.offset // alignment) * alignment
