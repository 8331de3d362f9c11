"""The default model as it is served is as good as its file: perplexity within 0.5 % of the float32 reference.

The text and what is computed are those of benchmarks/perplexity.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from benchmarks import perplexity
from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from tests.models.test_embedded import PATH

SHORT = 96  # tokens

embedded = pytest.mark.skipif(not PATH.is_file(), reason="the embedded model is not in the cache: make install")


@functools.cache
def reference(num_tokens: int | None) -> Tensor:
    """Losses of the first tokens by the torch ops, from dequantized weights in float32."""
    model = perplexity.loaded(open_checkpoint(PATH), make_ops("torch", 1), torch.float32, Quantization.NONE)
    ids = perplexity.prose_tokens(PATH)[:num_tokens]
    return perplexity.losses(perplexity.model_logits(model, torch.float32), ids)


def as_served(native, num_tokens: int | None) -> Tensor:
    model = perplexity.loaded(open_checkpoint(PATH), native, torch.bfloat16, Quantization.FILE)
    ids = perplexity.prose_tokens(PATH)[:num_tokens]
    return perplexity.losses(perplexity.model_logits(model, torch.bfloat16), ids)


@embedded
@pytest.mark.slow
def test_perplexity_as_served_is_within_half_a_percent_of_float32(native):
    more = perplexity.change(as_served(native, None), reference(None))
    assert abs(more.value) < perplexity.LIMIT, f"{more.value:+.3%} ± {more.error:.3%}"


@pytest.mark.slow
@embedded
def test_perplexity_of_a_page_is_that_of_float32_within_its_error(native):
    more = perplexity.change(as_served(native, SHORT), reference(SHORT))
    assert more.error < 0.01
    assert abs(more.value) < perplexity.LIMIT + 2 * more.error, f"{more.value:+.3%} ± {more.error:.3%}"


def test_losses_are_of_every_token_but_the_first_of_each_window():
    """A model that always gives token t + 1 after t the probability 1/2 and 95 others the rest."""

    def logits(ids: list[int]) -> Tensor:
        scores = torch.zeros(len(ids), 96)
        scores[torch.arange(len(ids)), torch.tensor(ids) + 1] = torch.tensor(95.0).log()
        return scores

    found = perplexity.losses(logits, [1, 2, 3, 4, 9, 10, 11], window=3)
    expected = torch.tensor([2.0, 2.0, 190.0, 2.0], dtype=torch.float64).log()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_change_is_relative_and_has_the_error_of_a_mean():
    reference = torch.zeros(100, dtype=torch.float64)
    more = perplexity.change(reference + torch.tensor([0.0, 0.02] * 50), reference)
    assert more.value == pytest.approx(0.01005, rel=1e-3)
    assert more.error == pytest.approx(0.001005, rel=1e-2)
