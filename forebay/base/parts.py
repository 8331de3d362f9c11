"""Frozen records of numpy columns, each declared once: its content, its length, and its form on the device.

They are compared by their bytes, their arrays are read-only, and they travel: `Part.decode(part.encode()) == part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any, ClassVar, Final, Self, cast, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

Pool = str
"""What a number indexes: "rows" and "columns" of the page table, KV "lengths" up to the longest, "positions" of a
row's tokens, the slots of a kind of cache by its name, the vocabulary ("tokens"), or the step's own sequences
("seqs")."""


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of a part's column, beside its type: `Annotated[I64, Column("S", ...)]`.

    Columns of one `length` (a letter) are equally long. Their numbers index `pool`, from `least` on; a column without a
    pool indexes nothing. Of those with a `device` type the device gets a copy, under the column's name or
    `device_name`. Those with a `pad` are inputs of captured steps, and that is what padded rows hold there; as a letter
    it stands for a size that the step knows. The `dtype` is filled in from the annotation.
    """

    length: str
    pool: Pool | None = None
    _: KW_ONLY
    least: int = 0
    device: type[np.int32] | type[np.int64] | None = None
    device_name: str = ""
    pad: int | str | None = None
    dtype: np.dtype[Any] | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True, eq=False):
    """`columns` are those that the part declares, in order, each with its type; not those of parts within it. Fields
    that are not columns are whatever msgspec can encode."""

    columns: ClassVar[Mapping[str, Column]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.columns = {
            name: replace(column, dtype=_dtype(hint.__origin__))
            for name, hint in get_type_hints(cls, include_extras=True).items()
            for column in getattr(hint, "__metadata__", ())
            if isinstance(column, Column)
        }

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            values = getattr(self, name)
            if values.dtype != column.dtype:
                raise TypeError(f"{type(self).__name__}.{name} is {values.dtype}, not {column.dtype}")
            values.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.encode() == self.encode()

    @classmethod
    def padding(cls, lengths: Mapping[str, int]) -> dict[str, Any]:
        """The columns that have a pad, of nothing else; `lengths` by letter, of the pads too."""
        return {
            name: np.full(lengths[column.length], lengths[column.pad] if isinstance(column.pad, str) else column.pad)
            for name, column in cls.columns.items()
            if column.pad is not None
        }

    def encode(self) -> bytes:
        """Return the columns as msgpack bytes, which determine equality and the digest of a plan."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """msgspec.ValidationError for what no part of this type encodes to."""
        return cast(Self, _decoder(cls).decode(data))


def paths_of(part: type[Part]) -> Mapping[str, Column]:
    """The columns of a part and of those within it, by the way to them: `rows`, `writes.write_rows`."""
    found = dict(part.columns)
    for field, hint in get_type_hints(part).items():
        if isinstance(hint, type) and issubclass(hint, Part):
            found |= {f"{field}.{path}": column for path, column in paths_of(hint).items()}
    return found


def _dtype(array_type: Any) -> np.dtype[Any]:
    """int64 of `NDArray[np.int64]`, which is `ndarray[shape, dtype[int64]]`, or from numpy 2.5 on an alias of int64."""
    inner = get_args(array_type)[-1]
    dtype: np.dtype[Any] = np.dtype(*(get_args(inner) or (inner,)))
    return dtype


def _to_bytes(values: object) -> bytes:
    if isinstance(values, np.ndarray):
        return values.tobytes()
    raise TypeError(f"a part holds a {type(values).__name__}")


def _from_bytes(array_type: type, data: bytes) -> npt.NDArray[Any]:
    dtype, empty = _arrays_of(array_type)
    return np.frombuffer(data, dtype) if data else empty


@cache
def _arrays_of(array_type: type) -> tuple[np.dtype[Any], npt.NDArray[Any]]:
    """Return the type of an array's entries, and an array without entries, which parts share: most columns of a plan
    are empty."""
    dtype = _dtype(array_type)
    return dtype, np.frombuffer(b"", dtype)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_to_bytes)


@cache
def _decoder(part: type[Part]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(part, dec_hook=_from_bytes)
