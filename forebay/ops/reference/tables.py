"""Embeddings of n-grams, whose tables stay in their files: the ops of every CPU backend, defined in torch.

Qwen 4; checked against transformers' `qwen4_exp`.

Shape letters: T tokens, P tokens before each, G heads, D entries of a row, F parts of a table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from forebay.formats.gguf_types import GGML_TYPES, dequantize

DIGITS: Final = 3
"""A token id is so many digits of 8 bits, which are exact in bfloat16."""

_READ: Final = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL")
STORED: Final[Mapping[str, int]] = {block.name: number for number, block in GGML_TYPES.items() if block.name in _READ}
"""The types of tables, whatever the file is, with their numbers in GGUF files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """A table in files, of rows of `width` entries. All parts but the last have `part_rows` rows. `places` [F, 3] int64
    has for each part the file's descriptor, the offset of its first row in bytes, and its type, a number of `STORED`;
    rows are whole blocks of it. `files` keeps the descriptors open."""

    places: Tensor
    part_rows: int
    width: int
    files: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramHashes:
    """Places of n-grams in a table. All int64: `multipliers` [P + 1] of a token and of those before it, the nearest
    first; `sizes` and `offsets` [G], the rows of each head and the first of them, of the shortest n-grams first.
    `end`: the token that stands for every token before it, and before the first one."""

    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    end: int


class TableOps:
    """Rows of tables in files, read for each token."""

    def ngram_rows(self, ids: Tensor, before: Tensor, hashes: NgramHashes, table: RowTable) -> Tensor:
        """Return the rows of each token's n-grams, [T, G * D], in the dtype of `before`.

        ids [T] int64. before [T, P * DIGITS] has 1 + the id of each of the P tokens before, the nearest first, as
        digits, the lowest first. It has 0 if there is no such token. The hash of n tokens is the exclusive or of their
        ids times `multipliers`. Its row in a head is the remainder by the head's size. A row that cannot be read is
        NaN.
        """
        past = len(hashes.multipliers) - 1
        bases = torch.tensor([256**i for i in range(DIGITS)])
        kept = (before.view(len(ids), past, DIGITS).long() * bases).sum(dim=-1) - 1
        tokens = [ids]
        for i in range(past):
            token, nearer = kept[:, i], tokens[-1]
            ends = (token < 0) | ((nearer == hashes.end) if i else torch.zeros_like(token, dtype=torch.bool))
            tokens.append(token.masked_fill(ends, hashes.end))
        per_order = len(hashes.sizes) // past
        mixed, rows = ids * hashes.multipliers[0], []
        for order in range(1, past + 1):
            mixed = mixed ^ (tokens[order] * hashes.multipliers[order])
            heads = slice((order - 1) * per_order, order * per_order)
            rows.append(mixed.unsqueeze(1) % hashes.sizes[heads] + hashes.offsets[heads])
        return _read(torch.cat(rows, dim=1), table).flatten(1).to(before.dtype)


def _read(rows: Tensor, table: RowTable) -> Tensor:
    out = np.empty((rows.numel(), table.width), np.float32)
    places = table.places.tolist()
    for i, row in enumerate(rows.flatten().tolist()):
        part, at = divmod(row, table.part_rows)
        descriptor, offset, stored = places[part]
        block = GGML_TYPES[stored]
        size = table.width // block.elements * block.num_bytes
        data = os.pread(descriptor, size, offset + at * size)
        if len(data) < size:
            out[i] = np.nan
            continue
        out[i] = dequantize(np.frombuffer(data, np.uint8)[None], block)[0]
    return torch.from_numpy(out).view(*rows.shape, table.width)
