"""Compressed attention: lengths around blocks, windows and pages, every cut, and rows and pages that are used again."""

from __future__ import annotations

import pytest
import torch

from tests.models.drive import NUM_ROWS, Driver
from tests.models.tiny import page_size_of, random_ids

SOME = ["deepseek_v4"]
OTHERS = [pytest.param(case, marks=pytest.mark.slow) for case in ("deepseek_v4-yarn", "deepseek_v4-short-blocks")]
STATELESS = [*SOME, *OTHERS]
POOLED = [
    "glm5_next_text",
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("glm5_next_text-shared-softplus", "qwen4_exp_text-ngrams", "qwen4_exp_text-whole-heads")
    ),
]
CASES = [*STATELESS, *POOLED]
SHORT = (1, 2, 4, 5, 8, 9, 16, 17)  # with and without a whole block at the end
LONG = (127, 128, 129, 255, 256, 257)
EVERY = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("lengths", [SHORT[1:6], pytest.param(SHORT, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("case", CASES)
def test_every_cut_of_short_prompts_gives_the_logits_of_transformers(case, lengths, tiny, load):
    oracle, ids = tiny(case), random_ids(SHORT[-1], seed=3)
    model = load(oracle.path)
    for length in lengths:
        for cut in range(length):
            driver = Driver(model)
            parts = [driver.step([(1, part)])[0] for part in (ids[:cut], ids[cut:length]) if part]
            oracle.assert_agrees(torch.cat(parts), ids, f"length {length}, cut at {cut}")


@pytest.mark.quick(1)
@pytest.mark.parametrize("step", [83, EVERY])
@pytest.mark.parametrize("case", CASES)
def test_cuts_of_long_prompts_give_the_logits_of_transformers(case, step, tiny, load):
    oracle, ids = tiny(case), random_ids(LONG[-1], seed=4)
    model = load(oracle.path)
    for length in LONG:
        for cut in (*range(1, length, step), length - 1):
            driver = Driver(model, context=264)
            parts = [driver.step([(2, part)])[0] for part in (ids[:cut], ids[cut:length])]
            oracle.assert_agrees(torch.cat(parts), ids, f"length {length}, cut at {cut}")


@pytest.mark.parametrize("case", CASES)
def test_tokens_one_by_one_behind_a_row_s_last_request_give_the_logits_of_transformers(case, tiny, load):
    """Rings and entries hold what the row's last request left there."""
    oracle, ids, other = tiny(case), random_ids(40, seed=5), random_ids(45, seed=6)
    driver = Driver(load(oracle.path))
    for begin in (other, ids):
        driver.restart(3)
        parts = [driver.step([(3, [token])])[0] for token in begin]
        oracle.assert_agrees(torch.cat(parts), begin)


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_pages", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_another_row_goes_on_from_the_end_of_a_page(case, num_pages, tiny, load):
    """As behind a hit: the states of the block before are in the last page, and no block is open (C18)."""
    oracle, ids, other = tiny(case), random_ids(50, seed=7), random_ids(9, seed=8)
    driver = Driver(load(oracle.path), page_size=page_size_of(case, 8))
    length = num_pages * driver.page_size
    driver.step([(4, random_ids(23, seed=9))])
    driver.step([(1, ids)], snapshots=[(0, length, NUM_ROWS + 1)])
    for table in (driver.page_table, driver.window_table):
        table[4, :num_pages] = table[1, :num_pages]
    driver.cache.mover.copy("state", torch.tensor([NUM_ROWS + 1]), torch.tensor([4]))
    driver.lens[4] = length
    parts = [driver.step([(4, other[first : first + 2])])[0] for first in range(0, len(other), 2)]
    oracle.assert_agrees(torch.cat(parts), ids[:length] + other, first=length)


@pytest.mark.quick(3)
@pytest.mark.parametrize("width", [2, 3, 6, 9])
@pytest.mark.parametrize("case", STATELESS)
def test_rejected_tokens_of_every_width_leave_no_trace(case, width, tiny, load):
    """Each step verifies `width` tokens, of which so many stay as chance has it (C16): states and entries of the others
    are overwritten before anything reads them."""
    oracle, ids, wrong = tiny(case), random_ids(60, seed=10), random_ids(80, seed=11)
    driver, kept = Driver(load(oracle.path), width=width, context=80), []
    generator = torch.Generator().manual_seed(width)
    while (length := driver.lens[5]) < len(ids):
        stay = int(torch.randint(1, width + 1, (), generator=generator))
        tokens = ids[length : length + stay] + wrong[length + stay : length + width]
        kept.append(driver.step([(5, tokens)])[0][:stay])
        driver.lens[5] = length + stay
    oracle.assert_agrees(torch.cat(kept)[: len(ids)], ids)
