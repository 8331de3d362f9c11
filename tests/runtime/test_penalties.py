from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission
from forebay.runtime.sampling.penalties import Penalties, Span, spans_of
from tests.runtime.plans import known

V = 23
TOKENS = st.lists(st.integers(0, V - 1) | st.integers(7, 9), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -0.5, 3.0]), max_size=4),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
    stop_token_ids=st.sampled_from([(), (4,), (4, 5)]),
    allowed_token_ids=st.sampled_from([(), tuple(range(3, V))]),
    # Of so few tokens that outputs have the beginnings of words.
    bad_words=st.lists(st.lists(st.integers(7, 9), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


def admission(row: int, params: SamplingParams, prompt: list[int], output: list[int]) -> Admission:
    held = params.stop_token_ids if len(output) < params.min_tokens else ()
    own = {"row": row, "request_id": 0, "params": params, "num_prompt": len(prompt), "stop_ids": held}
    return Admission(token_ids=known(prompt + output), **own)


def oracle(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    result = []
    for token, value in enumerate(logits.tolist()):
        if token in prompt + output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        value += params.logit_bias.get(token, 0.0)
        result.append(value if may_come(token, params, output) else -math.inf)
    return result


def may_come(token: int, params: SamplingParams, output: list[int]) -> bool:
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return False
    if len(output) < params.min_tokens and token in params.stop_token_ids:
        return False
    return not any((*output, token)[-len(word) :] == word for word in params.bad_words)


def one(row: int) -> list[Span]:
    return [Span(row, 0, 1)]


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 4


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=4),
    steps=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@example(
    requests=[(SamplingParams(min_tokens=3, stop_token_ids=(4,)), [1], [5, 6])], steps=2, seed=0
)  # one token more, then an end may come
def test_every_row_is_penalized_for_what_it_said_and_no_other(requests, steps, seed):
    """A request that brings output of its own was retracted: its output counts as before."""
    penalties = Penalties(V, torch.device("cpu"))
    rng = np.random.default_rng(seed)
    outputs = []
    for row, (params, prompt, output) in enumerate(requests, start=1):
        penalties.admit(admission(row, params, prompt, output))
        outputs.append(list(output))
    rows = rng.permutation(len(requests)) + 1
    for step in range(steps + 1):
        logits = random_logits(len(rows), seed + step)
        untouched = logits.clone()
        adjusted = penalties.apply(logits, spans_of(rows))
        assert torch.equal(logits, untouched)
        for i, row in enumerate(rows):
            params, prompt, _ = requests[row - 1]
            expected = torch.tensor(oracle(logits[i], params, prompt, outputs[row - 1]))
            torch.testing.assert_close(adjusted[i], expected, rtol=1e-5, atol=1e-4)
        tokens = torch.from_numpy(rng.integers(0, V, len(rows)))
        penalties.record(tokens, spans_of(rows))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            outputs[row - 1].append(token)


def test_a_request_that_comes_back_after_a_retraction_has_the_logits_it_would_have_had():
    """C26, by a bit."""
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.2, logit_bias={2: 1.5})
    prompt, output = [1, 2, 3, 3], [5, 3, 5, 9]
    steady, retracted = Penalties(V, torch.device("cpu")), Penalties(V, torch.device("cpu"))
    steady.admit(admission(1, params, prompt, []))
    retracted.admit(admission(4, params, prompt, []))
    for token in output:
        steady.record(torch.tensor([token]), one(1))
    for token in output[:2]:
        retracted.record(torch.tensor([token]), one(4))
    retracted.admit(admission(2, params, prompt, output))
    logits = random_logits(1, 0)
    assert torch.equal(steady.apply(logits, one(1)), retracted.apply(logits, one(2)))


def test_a_rows_next_tenant_inherits_nothing():
    penalties = Penalties(V, torch.device("cpu"))
    wishes = SamplingParams(repetition_penalty=2.0, logit_bias={3: 50.0}, allowed_token_ids=(3, 4))
    penalties.admit(admission(1, wishes, [1, 2], [3]))
    penalties.admit(admission(1, SamplingParams(), [4], []))
    logits = random_logits(1, 1)
    penalties.record(torch.tensor([3]), one(1))
    assert torch.equal(penalties.apply(logits, one(1)), logits)


def test_penalties_make_no_row_finite_that_was_not():
    penalties = Penalties(4, torch.device("cpu"))
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=2.0, logit_bias={0: -100.0, 1: -100.0})
    penalties.admit(admission(1, params, [0], [1]))
    adjusted = penalties.apply(torch.tensor([[float("inf"), float("nan"), 0.0, float("-inf")]]), one(1))
    assert adjusted[0, 0] == float("inf")
    assert adjusted[0, 1].isnan()
    assert adjusted[0, 3] == float("-inf")


@settings(max_examples=60)
@given(
    params=PARAMS,
    prompt=TOKENS,
    output=TOKENS,
    guessed=st.lists(st.integers(0, V - 1), min_size=1, max_size=4),
    num_new=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@example(SamplingParams(bad_words=((7, 8),)), [], [], [7, 9], 1, 0)  # a word whose head alone was accepted
@example(SamplingParams(min_tokens=2, stop_token_ids=[7]), [], [3], [5], 1, 0)  # a guess reaches the least length
def test_a_guess_counts_for_those_behind_it_and_for_later_steps_if_it_is_accepted(
    params, prompt, output, guessed, num_new, seed
):
    """C16: each position's logits are those that it has when the tokens before it were sampled one by one."""
    penalties = Penalties(V, torch.device("cpu"))
    penalties.admit(admission(1, params, prompt, output))
    n = len(guessed) + 1
    logits, spans = random_logits(n + 1, seed), [Span(2, 0, 1), Span(1, 1, n + 1)]
    adjusted = penalties.apply(logits, spans, torch.tensor([9, 9, *guessed]))
    assert torch.equal(adjusted[0], logits[0]), "another row, which has no penalties"
    for j in range(n):
        alone = Penalties(V, torch.device("cpu"))
        alone.admit(admission(1, params, prompt, output + guessed[:j]))
        assert torch.equal(adjusted[1 + j], alone.apply(logits[1 + j : 2 + j], one(1))[0])
    sampled = [*guessed, 3]
    num_new = min(num_new, n)
    penalties.record(torch.tensor([0, *sampled]), spans, torch.tensor([1, num_new]))
    alone = Penalties(V, torch.device("cpu"))
    alone.admit(admission(1, params, prompt, output + sampled[:num_new]))
    assert torch.equal(penalties.apply(logits[:1], one(1)), alone.apply(logits[:1], one(1)))
