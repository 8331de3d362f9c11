"""Limits of sampling parameters."""

import math
from functools import partial
from itertools import product

import msgspec
import pytest

from forebay.base.errors import InvalidRequest, ModelError
from forebay.base.sampling import NUMBERS
from forebay.requests.sampling_params import RANDOM_SEED, Pooling, PoolingKind, SamplingParams, seed_of_choice
from tests.together import together

NUMERIC = [*NUMBERS, *(f.name for f in msgspec.structs.fields(SamplingParams) if f.type in (int, float))]


def test_the_defaults_are_valid():
    params = SamplingParams()
    params.check(vocab_size=10)
    assert not params.greedy
    assert not params.adjusts


@together("field, value", product(NUMERIC, [math.nan, math.inf, -math.inf, -3, 2**64]))
def test_every_numeric_field_refuses_what_is_out_of_range(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert any(str(number) in caught.value.message for number in (value, float(value)))
    with pytest.raises(InvalidRequest):
        msgspec.structs.replace(SamplingParams(), **{field: value}).check(vocab_size=10)


@pytest.mark.parametrize("token", [-1, 10, 2**31, 2**63])
def test_every_token_id_is_checked_against_the_vocabulary(token):
    scored = SamplingParams.of_pooling(Pooling(PoolingKind.LAST, (token,)))
    asked = (
        {"logit_bias": {5: 1.0, token: 1.0}},
        {"stop_token_ids": (5, token, 5)},
        {"allowed_token_ids": (5, token, 5)},
        {"bad_words": ((5,), (5, token, 5))},
    )
    for params in (scored, *(SamplingParams(**wishes) for wishes in asked)):
        with pytest.raises(InvalidRequest, match=r"not in 0\.\.9"):
            params.check(vocab_size=10)


@pytest.mark.whole
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.0},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"stop_token_ids": tuple(range(257))},
        {"pooling": Pooling(PoolingKind.LAST)},
        {"max_tokens": 1, "temperature": 0.0, "pooling": Pooling(PoolingKind.MEAN, (1,))},
        {"max_tokens": 1, "temperature": 0.0, "pooling": Pooling(PoolingKind.LAST, (1,) * 257)},
        {"max_tokens": 1, "temperature": 0.0, "pooling": Pooling(PoolingKind.LAST, (1,), head=True)},
        {"max_tokens": 1, "temperature": 0.0, "pooling": Pooling(PoolingKind.LAST, head=True, outputs=(2, 2))},
        {"bad_words": ((),)},
        {"bad_words": ((1,) * 257,)},
        {"stop": ("",)},
        {"stop_regex": ("(",)},
        {"grammar": '{"type": "json"}', "min_tokens": 2},
    ],
)
def test_other_values_out_of_range_are_refused_at_construction_and_wherever_they_come_from(params):
    with pytest.raises(InvalidRequest):
        SamplingParams(**params)
    with pytest.raises(InvalidRequest):
        msgspec.structs.replace(SamplingParams(), **params).check(vocab_size=10_000)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"mirostat": 2}, "mirostat", "this sampler is not in this version"),
        ({"cache_prompt": True}, "cache_prompt", "it changes no token: leave it out"),
        ({"json_schema": "{}"}, "json_schema", r"give grammar=Grammar\(kind, text\)"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", r"give grammar=Grammar\(kind, text\)"),
        ({"temperature": "hot"}, "temperature", "temperature is .hot.: expected `float`, got `str`"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected `int`, got `str`"),
        ({"stop": "a", "stop_token_ids": [1, "x"]}, "stop_token_ids", "expected `int`, got `str`"),
        ({"max_new_tokens": 1, "max_tokens": 2}, "max_tokens", "by two names"),
    ],
)
def test_names_and_types_that_cannot_be_are_refused_with_what_to_do(params, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


def test_what_other_engines_users_write_means_what_it_means_there():
    theirs = SamplingParams(max_new_tokens=3, top_k=-1, seed=None, stop_token_ids=[1, 2], logit_bias={"5": 1})
    assert theirs == SamplingParams(max_tokens=3, stop_token_ids=(1, 2), logit_bias={5: 1.0})


def test_as_many_bad_words_may_be_spelled_as_may_be_named():
    named = SamplingParams(bad_words=[f"word {i}" for i in range(64)])
    spelled = tuple((place, i) for i in range(64) for place in (0, 1))
    msgspec.structs.replace(named, bad_words=spelled).check(vocab_size=64)
    with pytest.raises(InvalidRequest, match="65 entries; at most 64"):
        SamplingParams(bad_words=["x"] * 65)
    for words in ([*spelled, (5,)], ["x", *spelled[:-1]]):
        with pytest.raises(InvalidRequest, match="129 entries; at most 128"):
            SamplingParams(bad_words=words)


def test_penalties_are_noticed():
    assert SamplingParams(frequency_penalty=0.1).adjusts
    assert SamplingParams(temperature=0.0).greedy


def distinct(num: int) -> tuple[int, ...]:
    return tuple(range(num))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("field", "fits", "more"),
    [
        ("max_tokens", 2**31 - 1, 2**31),
        ("max_tokens", 1, 0),
        ("n", 1 << 20, (1 << 20) + 1),
        ("n", 1, 0),
        ("seed", 2**63 - 1, 2**63),
        ("seed", -1, -2),
        ("logprobs", 20, 21),
        ("logprobs", -1, -2),
        ("prompt_logprobs", 20, 21),
        ("prompt_logprobs", -1, -2),
        ("min_tokens", 128, 129),  # as many as `max_tokens`
        ("logit_bias", dict.fromkeys(distinct(1024), 1.0), dict.fromkeys(distinct(1025), 1.0)),
        ("logit_bias", {1: 100.0, 2: -100.0}, {1: -100.5}),
        ("stop_token_ids", distinct(256), distinct(257)),
        ("allowed_token_ids", distinct(1 << 16), distinct((1 << 16) + 1)),
        ("stop", ("x",) * 16, ("x",) * 17),
        ("stop", ("é" * 128,), ("é" * 128 + "x",)),
        ("stop", ("x",), ("",)),
        ("stop_regex", ("x",) * 4, ("x",) * 5),
        ("stop_regex", (f"[{'x' * 254}]",), (f"[{'x' * 255}]",)),
        ("bad_words", ("x",) * 64, ("x",) * 65),
        ("bad_words", ((1,),) * 128, ((1,),) * 129),
        ("bad_words", ("x", *((1,),) * 126), ("x", *((1,),) * 127)),  # a text counts twice
        ("bad_words", (distinct(256),), (distinct(257),)),
        ("bad_words", ("x",), ("",)),
    ],
)
def test_sampling_value_at_its_limit_is_taken_and_one_beyond_is_refused(field, fits, more):
    assert getattr(SamplingParams(**{field: fits}), field) == fits
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: more})
    assert caught.value.param == field


def test_pooling_scores_up_to_256_tokens():
    for num, fits in ((256, True), (257, False)):
        pooled = SamplingParams.of_pooling(Pooling(PoolingKind.LAST, distinct(num)))
        if fits:
            pooled.check(vocab_size=1000)
        else:
            with pytest.raises(InvalidRequest, match="at most 256"):
                pooled.check(vocab_size=1000)


def test_fields_about_texts_are_refused_for_token_ids_by_their_names():
    for field, value in (
        ("n", 2),
        ("stop", ("x",)),
        ("stop_regex", ("x",)),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
    ):
        params = SamplingParams(**{field: value})
        assert params.of_tokens() == SamplingParams()
        with pytest.raises(InvalidRequest, match="about texts") as caught:
            params.check(vocab_size=10)
        assert caught.value.param == field


def test_bad_words_that_are_texts_are_refused_for_token_ids():
    for words in (("x",), ((5,), "x")):
        with pytest.raises(InvalidRequest, match="bad_words has the text 'x': only token ids") as caught:
            SamplingParams(bad_words=words).check(vocab_size=10)
        assert caught.value.param == "bad_words"


@pytest.mark.parametrize("name", NUMBERS)
def test_number_just_beyond_its_bounds_is_refused_wherever_it_comes_from(name):
    number, step = NUMBERS[name], 1 if NUMBERS[name].is_whole else 1e-3
    kind = type(number.default)
    lowest, below = (1e-9, 0.0) if number.above_low else (number.low, number.low - 2 * step)  # -1 of top_k is off
    for fits, beyond in ((lowest, below), (number.high, number.high + step)):
        msgspec.structs.replace(SamplingParams(), **{name: kind(fits)}).check(vocab_size=10)
        for make in (SamplingParams, partial(msgspec.structs.replace, SamplingParams())):
            with pytest.raises(InvalidRequest) as caught:
                make(**{name: beyond}).check(vocab_size=10)
            assert caught.value.param == name


def test_of_several_token_ids_out_of_range_the_lowest_is_named():
    with pytest.raises(InvalidRequest, match=r"stop_token_ids: token id -1 is not in 0\.\.9"):
        SamplingParams(stop_token_ids=(99, -1, 5)).check(vocab_size=10)


def test_defaults_of_a_model_that_no_request_may_have_are_refused_by_their_source():
    assert SamplingParams.defaults({"top_p": 0.5}, "generation_config.json").top_p == 0.5
    with pytest.raises(ModelError, match=r"generation_config.json has sampling values that cannot be: .*top_p"):
        SamplingParams.defaults({"top_p": 7.0}, "generation_config.json")


def test_outputs_of_one_prompt_have_seeds_that_differ_and_repeat():
    seeds = [seed_of_choice(5, number) for number in range(4)]
    assert seeds[0] == 5
    assert len({*seeds}) == 4
    assert seeds == [seed_of_choice(5, number) for number in range(4)]
    assert seed_of_choice(RANDOM_SEED, 0) != seed_of_choice(RANDOM_SEED, 0)
