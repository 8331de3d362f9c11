"""Writes a safetensors file tensor by tensor: only the header needs to be known in full."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import BinaryIO, Final, NamedTuple

_ITEM_BYTES: Final = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_ALIGNMENT: Final = 8


class Entry(NamedTuple):
    """A tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(file: BinaryIO, entries: Mapping[str, Entry], values: Iterable[bytes | memoryview]) -> None:
    """Write tensors, whose `values` come in the order of `entries`, each in one piece or several."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for value in values:
        file.write(value)
