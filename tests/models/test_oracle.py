"""Logits equal transformers' whatever the chunks, the batch around a sequence and the pages it lies on (C28)."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels import NATIVE
from tests.models.drive import NUM_ROWS, Driver
from tests.models.tiny import CASE_OF, CASES, by_tier, make_tiny, random_ids

PROMPT = 20
SOME = (1, 2, 5, 7, 19)  # chunks: less than a convolution, a page and a window, and more than each
ALL = pytest.param(range(1, PROMPT + 1), marks=pytest.mark.slow)
# By the native kernels, other cases than a type's first have nothing that those of `torch` have not.
PREFILLS = [
    pytest.param(backend, case, marks=[pytest.mark.slow][: backend == NATIVE and case not in CASE_OF.values()])
    for case in CASES
    for backend in ("torch", NATIVE)
]


@pytest.mark.parametrize(("ops", "case"), PREFILLS, indirect=["ops"])
def test_prefill_gives_the_logits_of_transformers(case, tiny, load):
    oracle, ids = tiny(case), random_ids(3 * PROMPT, seed=1)
    (logits,) = Driver(load(oracle.path)).step([(1, ids)])
    oracle.assert_agrees(logits, ids)


@pytest.mark.quick(12)
@pytest.mark.parametrize("chunks", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("case", by_tier(CASES))
def test_every_chunk_size_gives_the_logits_of_transformers(case, chunks, tiny, load):
    oracle, ids = tiny(case), random_ids(PROMPT, seed=2)
    model = load(oracle.path)
    for chunk in chunks:
        driver = Driver(model)
        parts = [driver.step([(1, ids[first : first + chunk])])[0] for first in range(0, PROMPT, chunk)]
        oracle.assert_agrees(torch.cat(parts), ids, f"chunk {chunk}")


@pytest.mark.quick(24)
@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.slow), 16])  # the other tests' is 4
@pytest.mark.parametrize("case", by_tier(CASES, more=CASE_OF.values()))
def test_mixed_batches_give_each_sequence_its_own_logits(case, page_size, tiny, load):
    oracle, rng = tiny(case), random.Random(page_size)
    whole = {row: random_ids(30, seed=row) for row in range(1, NUM_ROWS + 1)}  # the oracle is asked for these alone
    sequences = {row: ids[: rng.randint(8, 30)] for row, ids in whole.items()}
    driver = Driver(load(oracle.path), page_size=page_size)
    got = {row: [] for row in sequences}
    while left := {row: ids[driver.lens[row] :] for row, ids in sequences.items() if driver.lens[row] < len(ids)}:
        batch = _random_step(rng, left)
        for (row, _), logits in zip(batch, driver.step(batch), strict=True):
            got[row].append(logits)
    for row, ids in sequences.items():
        assert len(ids) == sum(map(len, got[row]))
        oracle.assert_agrees(torch.cat(got[row]), whole[row], f"row {row}")


def _random_step(rng: random.Random, left: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
    """Some of the rows in random order: the extends take a few tokens each, the decodes after them one."""
    rows = rng.sample(sorted(left), rng.randint(1, len(left)))
    extends = rng.randint(0, len(rows))
    return [(row, left[row][: rng.randint(2, 9) if i < extends else 1]) for i, row in enumerate(rows)]


@pytest.mark.parametrize("seed", [3, 4])
def test_other_weights_and_prompts(seed, tmp_path, load):
    for case in ("llama", "olmo2", "qwen3_moe"):
        oracle, ids = make_tiny(case, tmp_path / case, seed=seed), random_ids(40, seed=seed)
        (logits,) = Driver(load(oracle.path)).step([(2, ids)])
        oracle.assert_agrees(logits, ids)


def test_a_step_without_tokens_gives_no_logits(tiny, load):
    (logits,) = Driver(load(tiny("qwen3_moe").path)).step([(1, [])])
    assert logits.shape == (0, 96)
