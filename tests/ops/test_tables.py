"""Rows of n-grams from files: by every backend, in every type of a file, and if a file is too short."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from forebay.formats.file_array import WeightFile
from forebay.ops.interface import Ops
from forebay.ops.reference.tables import DIGITS, STORED, NgramHashes, RowTable
from tests.formats.gguf_files import quantized
from tests.ops.helpers import assert_same_bits

END, WIDTH, PART_ROWS, PAST = 7, 544, 50, 2  # rows of 17 blocks are read in two pieces
SIZES = (41, 43, 47, 53)
OFFSET = 12  # bytes of the file before the table


def hashes() -> NgramHashes:
    sizes = torch.tensor(SIZES)
    multipliers = torch.tensor([2**40 + 1, 3 * 2**38 + 5, 2**41 + 11])
    return NgramHashes(multipliers=multipliers, sizes=sizes, offsets=sizes.cumsum(0) - sizes, end=END)


def digits(*tokens: int) -> list[int]:
    return [(token + 1) >> (8 * i) & 255 for token in tokens for i in range(DIGITS)]


def table(folder: Path, kind: str, *, rows: int = sum(SIZES)) -> tuple[RowTable, Tensor]:
    """Return a table of random rows of a type, and its values, float32."""
    raw = quantized(kind, (sum(SIZES), WIDTH), seed=3)
    path = folder / f"{kind}-{rows}"
    path.write_bytes(b"x" * OFFSET + raw[:rows].tobytes())
    file = WeightFile(path)
    firsts = range(0, sum(SIZES), PART_ROWS)
    places = [(file.descriptor, OFFSET + first * raw.shape[1], STORED[kind]) for first in firsts]
    found = RowTable(places=torch.tensor(places), part_rows=PART_ROWS, width=WIDTH, files=(file,))
    return found, torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def expected(values: Tensor, history: list[int]) -> Tensor:
    """Rows of the last token of a text, by the definition."""
    of = hashes()
    *past, last = history
    tokens, ended = [last], False
    for back in range(1, PAST + 1):
        token = past[-back] if back <= len(past) else END
        ended = ended or token == END
        tokens.append(END if ended else token)
    rows = []
    for head, size in enumerate(SIZES):
        mixed = 0
        for token, factor in zip(tokens[: 2 + head // 2], of.multipliers.tolist(), strict=False):
            mixed ^= token * factor
        rows.append(values[mixed % size + sum(SIZES[:head])])
    return torch.cat(rows)


@pytest.mark.parametrize("kind", STORED)
def test_ngram_rows_are_those_of_each_token_and_the_tokens_before(
    each_ops: Ops, dtype: torch.dtype, tmp_path: Path, kind: str
) -> None:
    text = [3, 70_000, 12, END, 250, END, END, 255, 256, 65_535, 65_536, 1]
    found, values = table(tmp_path, kind)
    before = [digits(*[text[at - back] if at >= back else -1 for back in (1, 2)]) for at in range(len(text))]
    got = each_ops.tables.ngram_rows(torch.tensor(text), torch.tensor(before, dtype=dtype), hashes(), found)
    assert_same_bits(got, torch.stack([expected(values, text[: at + 1]) for at in range(len(text))]).to(dtype))


def test_ngram_rows_that_the_file_does_not_have_are_nan(each_ops: Ops, tmp_path: Path) -> None:
    found, values = table(tmp_path, "F32", rows=SIZES[0])
    before = torch.tensor([digits(4, 5)], dtype=torch.float32)
    got = each_ops.tables.ngram_rows(torch.tensor([9]), before, hashes(), found)[0]
    assert torch.equal(got[:WIDTH], expected(values, [5, 4, 9])[:WIDTH])
    assert got[WIDTH:].isnan().all()


def test_ngram_rows_of_no_token_are_none(each_ops: Ops, tmp_path: Path) -> None:
    found, _ = table(tmp_path, "F32")
    nothing = each_ops.tables.ngram_rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 6), hashes(), found)
    assert nothing.shape == (0, len(SIZES) * WIDTH)
