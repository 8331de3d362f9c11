"""Sequences that go on from another's prefix, and rows that are used again: KV, windows and recurrent states (C6, C18).

For models without recurrent states a snapshot is nothing and the shared pages are all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_spec import cache_sizes
from tests.models.drive import NUM_ROWS, Driver
from tests.models.tiny import CASES, by_tier, random_ids
from tests.pools.caches import cache_types

IDS, OTHER = random_ids(24, seed=6), random_ids(24, seed=7)
SLOTS = {4: NUM_ROWS + 1, 9: NUM_ROWS + 2, 13: NUM_ROWS + 3}  # of the snapshots of row 1, by length


def with_snapshots(model: Model, dtype: torch.dtype = torch.float32) -> Driver:
    """Row 1 has 20 tokens: 11, two snapshots among them, then 9 between other rows, with a third at the third of them;
    row 3 has a snapshot of its own."""
    driver = Driver(model, dtype=dtype)
    driver.step([(1, IDS[:11])], snapshots=[(0, 4, SLOTS[4]), (0, 9, SLOTS[9])])
    batch = [(3, OTHER[:5]), (1, IDS[11:20]), (2, OTHER[:1])]
    driver.step(batch, snapshots=[(0, 5, NUM_ROWS + 4), (1, 2, SLOTS[13])])
    return driver


def branches(driver: Driver) -> list[tuple[list[int], int, Tensor]]:
    """What rows 4, 5 and 6 make of other tokens behind the lengths that row 1 had snapshots at: all tokens of the row,
    how many of them were there, the logits of the rest. The longest first: each writes on over the shared pages."""
    made = []
    for row, length in ((4, 13), (5, 9), (6, 4)):
        driver.resume(row, SLOTS[length], 1, length)
        parts = [driver.step([(row, OTHER[first : first + 3])])[0] for first in range(0, 9, 3)]
        made.append((IDS[:length] + OTHER[:9], length, torch.cat(parts)))
    return made


# Layers that compress whole blocks go on from the ends of pages alone: test_compressed.py.
OF_BLOCKS = ("deepseek_v4", "glm5_next_text", "qwen4_exp_text")
ANYWHERE = [case for case, (model_type, _) in CASES.items() if model_type not in OF_BLOCKS]


@pytest.mark.parametrize("case", by_tier(ANYWHERE))
def test_a_sequence_goes_on_from_snapshots_inside_the_steps_of_another(case, tiny, load):
    oracle = tiny(case)
    for tokens, length, logits in branches(with_snapshots(load(oracle.path))):
        oracle.assert_agrees(logits, tokens, f"behind {length}", first=length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", by_tier(ANYWHERE))
def test_what_goes_on_from_a_snapshot_has_the_bits_of_what_was_never_interrupted(case, dtype, tiny, native):
    """C28; the snapshot itself, too, and the live states of those that took one."""
    model = models.load(open_checkpoint(tiny(case).path), ops=native, dtype=dtype)
    driver = with_snapshots(model, dtype)
    for length, slot in (*SLOTS.items(), (20, 1)):
        alone = Driver(model, dtype=dtype)
        alone.step([(1, IDS[:length])])
        for got, expected in zip(
            driver.cache.tables["state"].tensors, alone.cache.tables["state"].tensors, strict=True
        ):
            assert torch.equal(got[slot], expected[1]), f"at {length}"
    for tokens, length, logits in branches(driver):
        (whole,) = Driver(model, dtype=dtype).step([(1, tokens)])
        assert torch.equal(logits, whole[length:]), f"from {length}"


@pytest.mark.parametrize("case", by_tier(CASES))
def test_a_row_that_is_used_again_begins_as_if_it_were_new(case, tiny, native):
    model = models.load(open_checkpoint(tiny(case).path), ops=native, dtype=torch.float32)
    driver = Driver(model)
    driver.step([(2, IDS), (1, OTHER)])
    driver.restart(1)
    (again,) = driver.step([(1, IDS)])
    (new,) = Driver(model).step([(1, IDS)])
    assert torch.equal(again, new)


def test_a_state_that_was_not_cleared_shows(tiny, native):
    """So the tests above would notice."""
    model = models.load(open_checkpoint(tiny("mamba2").path), ops=native, dtype=torch.float32)
    driver = Driver(model)
    driver.step([(1, OTHER)])
    driver.lens[1] = 0
    (again,) = driver.step([(1, IDS)])
    (new,) = Driver(model).step([(1, IDS)])
    assert (again - new)[0].abs().max() > 0.1


class Kept:
    """`States` that keep what they run on of each token."""

    def __init__(self, batch: StateBatch, num_tokens: int) -> None:
        self.batch, self.num_tokens = batch, num_tokens
        self.tensors: list[Tensor] = []

    def run(self, op: Callable[..., Tensor], *inputs: object) -> Tensor:
        self.tensors += [x for x in inputs if isinstance(x, Tensor) and len(x) == self.num_tokens]
        return op(*inputs, self.batch)


@pytest.mark.parametrize("case", ["falcon_h1", "jamba", "qwen3_next", "kimi_linear", "lfm3"])
def test_layers_keep_as_much_of_tokens_that_may_not_stay_as_they_say(case, tiny, native):
    model, ids = models.load(open_checkpoint(tiny(case).path), ops=native, dtype=torch.bfloat16), IDS[:23]
    ctx, input_ids = Driver(model, dtype=torch.bfloat16).inputs([(1, ids)])
    kept = Kept(ctx.kinds["state"].batch, len(ids))
    model.forward(replace(ctx, kinds={**ctx.kinds, "state": kept}), input_ids)
    memory = {(whole := tensor.untyped_storage()).data_ptr(): whole.nbytes() for tensor in kept.tensors}
    said = cache_sizes(model.cache_specs(), cache_types(torch.bfloat16)).inputs_bytes_per_token
    assert 0.85 * said <= sum(memory.values()) / len(ids) <= said
