from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.sampling import Draws
from tests.ops.helpers import normal

ROWS = 40


def draws_of(seed: int) -> Draws:
    """Of ROWS rows."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (ROWS,), generator=generator)]

    uniform = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    columns = pick([0.3, 1.0, 4.0]), pick([0, 1, 30, 2047, 2049, 10**6]), pick([0.2, 0.95, 1.0]), pick([0, 0.01])
    return Draws(uniform, *columns)


@pytest.mark.parametrize("vocab", [1, 15, 97, 2048, 20_001])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_sample_rows_equals_the_reference(native: NativeOps, reference: Ops, vocab: int, scale: float) -> None:
    """But where the running sum passes the random number so closely that the last bit of an exp decides."""
    logits = normal((ROWS, vocab), torch.float32, seed=vocab, scale=scale)
    draws = draws_of(vocab)
    differ = native.sampling.sample_rows(logits, draws) != reference.sampling.sample_rows(logits, draws)
    assert int(differ.sum()) <= 1


def test_sampled_rows_have_the_same_bits_in_any_batch(native: NativeOps, single_threaded: NativeOps) -> None:
    logits = normal((ROWS, 5003), torch.float32, seed=1, scale=2)
    draws = draws_of(1)
    together = native.sampling.sample_rows(logits, draws)
    for i in range(ROWS):
        one = single_threaded.sampling.sample_rows(logits[i : i + 1], Draws(*(column[i : i + 1] for column in draws)))
        assert int(one) == int(together[i])


def test_columns_that_keep_all_are_as_good_as_none(native: NativeOps) -> None:
    logits = normal((ROWS, 997), torch.float32, seed=2)
    draws = draws_of(2)._replace(top_k=None, top_p=None, min_p=None)
    keep_all = draws._replace(
        top_k=torch.zeros(ROWS, dtype=torch.int64), top_p=torch.ones(ROWS), min_p=torch.zeros(ROWS)
    )
    assert torch.equal(native.sampling.sample_rows(logits, keep_all), native.sampling.sample_rows(logits, draws))


def test_no_rows_give_no_ids(native: NativeOps) -> None:
    nothing = torch.empty(0)
    ids = native.sampling.sample_rows(torch.empty(0, 97), Draws(nothing.double(), nothing, None, nothing))
    assert ids.shape == (0,)
