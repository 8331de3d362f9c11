"""Limits of sampling parameters."""

import math

import msgspec
import pytest

from forebay.base.errors import InvalidRequest
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams

NUMERIC = [f.name for f in msgspec.structs.fields(SamplingParams) if f.type in (int, float)]


def test_the_defaults_are_valid():
    params = SamplingParams()
    params.check(vocab_size=10)
    assert not params.greedy
    assert not params.adjusts


@pytest.mark.parametrize("field", NUMERIC)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3, 2**64])
def test_every_numeric_field_refuses_what_is_out_of_range(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).check(vocab_size=10)
    assert str(value) in caught.value.message


@pytest.mark.parametrize("token", [-1, 10, 2**31, 2**63])
def test_every_token_id_is_checked_against_the_vocabulary(token):
    for params in (SamplingParams(logit_bias={token: 1.0}), SamplingParams(stop_token_ids=(token,))):
        with pytest.raises(InvalidRequest, match=r"not in 0\.\.9"):
            params.check(vocab_size=10)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.0),
        SamplingParams(logit_bias={1: math.nan}),
        SamplingParams(logit_bias={1: 101.0}),
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
        SamplingParams(stop_token_ids=tuple(range(257))),
        SamplingParams(pooling=Pooling(PoolingKind.LAST)),
        SamplingParams.of_pooling(Pooling(PoolingKind.MEAN, (1,))),
        SamplingParams.of_pooling(Pooling(PoolingKind.LAST, (10_000,))),
        SamplingParams.of_pooling(Pooling(PoolingKind.LAST, (1,) * 257)),
    ],
)
def test_other_values_out_of_range_are_refused(params):
    with pytest.raises(InvalidRequest):
        params.check(vocab_size=10_000)


def test_penalties_are_noticed():
    assert SamplingParams(frequency_penalty=0.1).adjusts
    assert SamplingParams(temperature=0.0).greedy
