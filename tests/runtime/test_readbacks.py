from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.ops import Draws
from forebay.requests.sampling_params import SamplingParams
from tests.runtime.fake_model import FakeModel, fake_runner, planner
from tests.runtime.readbacks import readbacks

pytestmark = pytest.mark.usefixtures("native_ops")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0.0), 1),
        (SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01), 1),
        (SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0}), 1),
        (SamplingParams(temperature=0.0, min_tokens=9, allowed_token_ids=(3, 4, 5), bad_words=((3,), (4, 5))), 1),
        (SamplingParams(temperature=0.0, logprobs=3), 2),
    ],
    ids=["greedy", "sampled", "penalized", "restricted", "logprobs"],
)
def test_a_decode_step_reads_back_its_sampled_tokens_and_nothing_else(params, expected):
    """C11"""
    plans = planner(fake_runner())
    for row in (1, 2, 3):
        plans.admit(row, range(row, row + 6), params)
    plans.step(extends=[(1, 6), (2, 6), (3, 6)])
    with readbacks() as launching:
        launched = plans.launch(decodes=[1, 3, 2])
    assert launching == []
    with readbacks() as waiting:
        launched.result()
    assert waiting == ["numpy"] * expected


def test_an_extend_reads_back_no_more():
    """C11"""
    plans = planner(fake_runner())
    plans.admit(1, range(9), SamplingParams(temperature=0.9, top_p=0.5))
    with readbacks() as found:
        plans.step(extends=[(1, 4)])
        plans.step(extends=[(1, 5)])
        plans.step(decodes=[1])
    assert found == ["numpy"] * 3


def test_the_sampler_of_the_torch_ops_reads_nothing_back(ops):
    """C11: on a GPU it is what runs."""
    columns = (torch.full((3,), 5), torch.full((3,), 0.9), torch.full((3,), 0.1))
    with readbacks() as found:
        ops.sampling.sample_rows(torch.randn(3, 97), Draws(torch.rand(3, dtype=torch.float64), torch.ones(3), *columns))
        ops.sampling.argmax_rows(torch.randn(3, 97))
    assert found == []


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: int(x.max()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: float(x.sum()),
    ],
    ids=["item", "tolist", "numpy", "bool", "int", "mask", "nonzero", "float"],
)
def test_a_read_back_put_into_the_model_is_found(leak: Callable[[Tensor], object]):
    class Leaking(FakeModel):
        def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
            leak(ctx.full.seq_lens)
            return super().forward(ctx, input_ids)

    plans = planner(fake_runner(Leaking()))
    plans.admit(1, [1, 2, 3])
    plans.step(extends=[(1, 3)])
    with readbacks() as found:
        plans.launch(decodes=[1])
    assert found, "it may be found more than once: where the step is to be captured, it runs more than once"
