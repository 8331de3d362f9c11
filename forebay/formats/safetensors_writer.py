"""Writes a safetensors file tensor by tensor: only the header needs to be known in full."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import BinaryIO, Final

_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT: Final = 8


def write_safetensors(
    file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: str, values: Iterable[bytes]
) -> None:
    """Write tensors of one dtype, `values` in the order of `shapes`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for value in values:
        file.write(value)
