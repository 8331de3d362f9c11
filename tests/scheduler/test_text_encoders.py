"""Prompts of a text encoder are pooled and never cut, and tenants share its steps (C27, C32)."""

from __future__ import annotations

import pytest

from forebay.base.errors import InvalidRequest, RequestTooLarge
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from tests.scheduler.rig import Rig

MEAN = SamplingParams.of_pooling(Pooling(PoolingKind.MEAN))
ENCODER = {"text_encoder": True, "radix_cache": False, "chunked_prefill_size": 20, "context_length": 20}


def vectors(plan) -> dict[str, dict[int, bytes]]:
    return {"vectors": dict.fromkeys(plan.pooled, b"\0\0\0\0")}


@pytest.mark.parametrize("lengths", [(6, 9, 8, 20, 1, 3), (20, 20, 1), (1, 20, 19)])
def test_plan_text_encoder_computes_each_text_whole_in_one_step(lengths):
    rig = Rig(**ENCODER)
    for length in lengths:
        rig.add(length, params=MEAN)
    seen = []
    while not rig.scheduler.idle:
        plan = rig.launch()
        seen += plan.q_lens.tolist()
        assert plan.num_tokens <= 20
        assert not plan.starts.any()
        rig.commit(**vectors(plan))
    assert sorted(seen) == sorted(lengths)


def test_c32_text_encoder_long_text_is_not_overtaken_for_ever_by_short_ones():
    rig = Rig(**ENCODER, tenants={"a": 1, "b": 1})
    for _ in range(6):
        rig.add(8, params=MEAN, tenant="a")
    long = rig.add(20, params=MEAN, tenant="b")
    for _ in range(6):
        rig.add(12, params=MEAN, tenant="b")  # fills each step behind a text of the other tenant, which is served less
    steps = 0
    while long.id in rig.scheduler.requests:
        rig.commit(**vectors(rig.launch()))
        steps += 1
    assert steps <= 2


def test_add_text_encoder_refuses_generation_and_texts_longer_than_a_step():
    rig = Rig(**ENCODER)
    with pytest.raises(InvalidRequest, match="text encoder") as refused:
        rig.add(3)
    assert refused.value.code == "not_a_decoder"
    with pytest.raises(RequestTooLarge, match="21 tokens; the context holds 20"):
        rig.add(21, params=MEAN)
    for pooling, code in (
        (Pooling(PoolingKind.LAST, (5,)), "not_a_decoder"),
        (Pooling(PoolingKind.CLS, head=True), "no_labels"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            rig.add(3, params=SamplingParams.of_pooling(pooling))
        assert refused.value.code == code
    assert rig.scheduler.idle
