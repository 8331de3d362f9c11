"""The choices of one request, without a server around them."""

from __future__ import annotations

import pytest

from forebay.base.errors import Overloaded
from forebay.engine.client.choice import Prompt
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import Update
from forebay.server.api.core.generation import Generation, Order
from tests.server.fake_engine import FakeEngine


@pytest.mark.parametrize("stop", [{"stop": ("world",)}, {"stop_regex": ("w[a-z]+d",)}])
def test_c27_a_stop_string_ends_the_request_in_the_engine_too(tokenizer, stop) -> None:
    engine = FakeEngine(manual=True)
    order = Order(params=SamplingParams(**stop), namespace="", author="")
    generation = Generation.submit(engine, tokenizer.table, [Prompt(token_ids=[5])], order)
    (choice,) = generation.choices
    pieces = [choice.feed(Update(choice.stream.request_id, [token])) for token in tokenizer.encode("hello world")]
    assert ("".join(piece.text for piece in pieces), choice.finish) == ("hello ", "stop")
    assert engine.running == {}


def test_a_stop_string_that_ends_before_the_least_length_is_text(tokenizer) -> None:
    params = SamplingParams(stop=("hello", "world"), min_tokens=len(tokenizer.encode("hello")))
    order = Order(params=params, namespace="", author="")
    (choice,) = Generation.submit(FakeEngine(manual=True), tokenizer.table, [Prompt(token_ids=[5])], order).choices
    piece = choice.feed(Update(choice.stream.request_id, tokenizer.encode("hello world")))
    assert (piece.text, piece.finish) == ("hello ", "stop")


def test_c16_a_stop_string_inside_a_step_s_tokens_ends_the_answer_there(tokenizer) -> None:
    """Tokens behind it are not scored or counted."""
    engine = FakeEngine(manual=True)
    order = Order(params=SamplingParams(logprobs=0, stop="world"), namespace="", author="")
    generation = Generation.submit(engine, tokenizer.table, [Prompt(token_ids=[5])], order)
    (choice,) = generation.choices
    tokens, behind = tokenizer.encode("hello world"), tokenizer.encode(" again")
    scores = [TokenLogprob(token, -1.0, 1) for token in tokens + behind]
    piece = choice.feed(Update(choice.stream.request_id, tokens + behind, logprobs=scores))
    assert (piece.text, piece.finish, choice.num_tokens) == ("hello ", "stop", len(tokens))
    assert [scored.token_id for scored in piece.tokens] == tokens  # of which the last begins before the stop string
    assert engine.running == {}


def test_c27_what_was_submitted_is_aborted_when_a_later_choice_is_refused(tokenizer) -> None:
    engine = FakeEngine(manual=True, max_running=2, max_queued=0)
    with pytest.raises(Overloaded):
        Generation.submit(
            engine,
            tokenizer.table,
            [Prompt(token_ids=[5])],
            Order(params=SamplingParams(n=3), namespace="", author=""),
        )
    assert len(engine.submitted) == len(engine.aborted) == 2
    assert engine.running == {}


def test_c28_choices_of_one_seed_differ_and_repeat() -> None:
    order = Order(params=SamplingParams(n=3), namespace="", author="", seed=5)
    seeds = [order.params_of(number).seed for number in range(3)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert seeds == [order.params_of(number).seed for number in range(3)]
