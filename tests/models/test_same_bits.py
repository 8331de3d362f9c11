"""With the native ops a sequence's logits are the same bits whatever its chunks and whoever shares its steps (C28)."""

from __future__ import annotations

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from tests.models.drive import NUM_ROWS, Driver
from tests.models.tiny import CASES, by_tier, random_ids

LENGTH = 24
IDS = random_ids(LENGTH, seed=5)
OTHERS = {row: random_ids(LENGTH, seed=row) for row in range(2, NUM_ROWS + 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", by_tier(CASES))
def test_chunks_and_other_rows_do_not_change_a_bit(case, dtype, tiny, native):
    model = models.load(open_checkpoint(tiny(case).path), ops=native, dtype=dtype)
    (alone,) = Driver(model, dtype=dtype).step([(1, IDS)])
    assert alone.isfinite().all()
    for chunk in (1, 3, 7):
        assert torch.equal(_in_company(model, dtype, chunk), alone), f"chunks of {chunk}"


def _in_company(model: Model, dtype: torch.dtype, chunk: int) -> torch.Tensor:
    """Row 1's logits, taken in chunks between those of other rows, more of them in every step."""
    driver = Driver(model, dtype=dtype)
    parts = []
    for first in range(0, LENGTH, chunk):
        company = [(row, OTHERS[row][driver.lens[row] :][: row - 1]) for row in range(2, 2 + len(parts) % NUM_ROWS)]
        batch = [(row, ids) for row, ids in company if ids]
        batch.insert(len(batch) // 2, (1, IDS[first : first + chunk]))
        parts.append(driver.step(batch)[[row for row, _ in batch].index(1)])
    return torch.cat(parts)
