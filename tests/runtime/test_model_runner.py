"""The model runner on the fake model, whose logits show every mistake with rows, pages and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import HostWork, StepResult
from forebay.runtime import ModelRunner
from tests.runtime.fake_model import CONTEXT, NUM_ROWS, PAGE_SIZE, PAGES_PER_ROW, VOCAB, FakeModel, fake_runner, planner

BAD_TOKEN = VOCAB - 1
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={4: 1.0},
    seed=12345,
    logprobs=4,
)
WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.2, top_p=0.8, seed=5),
    "everything": EVERYTHING,
    "greedy-logprobs": SamplingParams(temperature=0.0, logprobs=2, presence_penalty=0.5),
}


def prompt(row: int, length: int = 7) -> list[int]:
    return [(row * 11 + 5 * i) % (VOCAB - 1) for i in range(length)]


def run_alone(row: int, params: SamplingParams, tokens: list[int], steps: int) -> list[StepResult]:
    plans = planner(fake_runner(), seed=row)
    plans.admit(row, tokens, params)
    return [plans.step(extends=[(row, len(tokens))])] + [plans.step(decodes=[row]) for _ in range(steps)]


def tokens_of(results: list[StepResult], index: int = 0) -> list[int]:
    return [result.token_ids[index] for result in results]


def test_model_runner_step_without_host_work_touches_neither_copies_nor_tiers(monkeypatch):
    """They cost such a step nothing."""
    expected, plans = run_alone(1, WISHES["drawn"], prompt(1), steps=3), planner(fake_runner(), seed=1)
    plans.runner.inputs.copies = plans.runner.inputs.tiers = None
    monkeypatch.delattr(HostWork, "copies")
    plans.admit(1, prompt(1), WISHES["drawn"])
    got = [plans.step(extends=[(1, 7)])] + [plans.step(decodes=[1]) for _ in range(3)]
    assert tokens_of(got) == tokens_of(expected)


def test_model_runner_result_names_a_step_of_decodes_with_padded_rows():
    plans = planner(fake_runner(), seed=1)
    plans.runner.decode.captured.sizes = [1, 3]
    for row in (1, 2, 3):
        plans.admit(row, prompt(row))
    steps = ([(1, 7), (2, 7)], []), ([], [1, 2]), ([(3, 7)], [1]), ([], [1, 2, 3]), ([], [3, 1]), ([], [2])
    padded = [plans.step(extends, decodes).padded for extends, decodes in steps]
    assert padded == [False, True, False, False, True, False]


@pytest.mark.parametrize("wish", WISHES)
def test_request_gets_the_same_tokens_and_logprobs_alone_and_in_a_batch(wish):
    """C28: in another row and on other pages too."""
    alone = run_alone(2, WISHES[wish], prompt(2), steps=6)
    plans = planner(fake_runner(), seed=9)
    others = list(WISHES.values())
    for row in (1, 3, 4, 5):
        plans.admit(row, prompt(row, 3 + row), others[row % len(others)])
    plans.admit(6, prompt(2), WISHES[wish])
    together = [plans.step(extends=[(6, 7), (3, 6), (1, 4)])]
    sampled_before = [plans.step(extends=[(4, 2), (5, 8)], decodes=[1, 6])]
    together += [plans.step(extends=[(4, 5)], decodes=[5, 3, 6])]
    at = [(together[0], 0), (sampled_before[0], 2), (together[1], 3)]
    at += [(plans.step(decodes=[1, 6, 4, 3]), 1) for _ in range(4)]
    for (result, index), expected in zip(at, alone, strict=True):
        assert result.token_ids[index] == expected.token_ids[0]
        if expected.logprobs:
            assert result.logprobs is not None
            assert result.logprobs[index] == expected.logprobs[0]


@pytest.mark.long
@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 12), max_size=6, unique=True), company=st.booleans(), top=st.integers(0, 5))
def test_prompt_logprobs_do_not_depend_on_how_the_prompt_is_cut(cuts, company, top):
    params = SamplingParams(temperature=0.0, prompt_logprobs=top, logprobs=1)
    tokens = prompt(1, 13)
    (whole,) = run_alone(1, params, tokens, steps=0)
    assert whole.prompt_logprobs is not None
    plans = planner(fake_runner())
    plans.admit(1, tokens, params)
    plans.admit(2, prompt(2, 15), params)
    entries, chunks = [], np.diff([0, *sorted(cuts), 13]).tolist()
    for chunk in chunks:
        result = plans.step(extends=[(2, 1), (1, chunk)] if company else [(1, chunk)])
        assert result.prompt_logprobs is not None
        entries += result.prompt_logprobs[int(company)]
    assert entries == whole.prompt_logprobs[0]
    assert result.token_ids == whole.token_ids
    assert [entry and entry.token_id for entry in entries] == [*tokens[1:], None]


def test_prompt_logprobs_are_those_of_the_logits():
    model = FakeModel()
    tokens = prompt(3, 10)
    plans = planner(fake_runner(model))
    plans.admit(3, tokens, SamplingParams(temperature=0.0, prompt_logprobs=2))
    seen: list[torch.Tensor] = []
    forward = model.forward
    model.forward = lambda ctx, ids: seen.append(forward(ctx, ids)) or seen[-1]
    result = plans.step(extends=[(3, 10)])
    expected = model.logits(seen[0]).double().log_softmax(-1)
    assert result.prompt_logprobs is not None
    for i, entry in enumerate(result.prompt_logprobs[0][:-1]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[i, tokens[i + 1]]), abs=1e-4)
        assert entry.top_ids == expected[i].topk(2).indices.tolist()


@pytest.mark.parametrize("wish", WISHES)
def test_depth_one_gives_what_depth_zero_gives(wish):
    """A step is launched before the tokens of the one before are known."""
    plans = planner(fake_runner())
    for row in (1, 2):
        plans.admit(row, prompt(row), WISHES[wish])
    waited = [plans.step(extends=[(1, 7), (2, 7)])] + [plans.step(decodes=[1, 2]) for _ in range(6)]
    plans = planner(fake_runner())
    for row in (1, 2):
        plans.admit(row, prompt(row), WISHES[wish])
    before, overlapped = plans.launch(extends=[(1, 7), (2, 7)]), []
    for _ in range(6):
        following = plans.launch(decodes=[1, 2])
        overlapped.append(before.result())
        before = following
    assert [*overlapped, before.result()] == waited


@pytest.mark.parametrize("wish", WISHES)
def test_rows_that_are_not_finite_fail_alone(wish):
    """C27: NaN and +inf in one batch; every other row's tokens and log-probabilities are the same to the bit, before,
    during and after, on the pages that the failed rows leave behind too."""

    def run(poison: dict[int, float]) -> list[StepResult]:
        model = FakeModel()
        model.poison = poison
        plans = planner(fake_runner(model))
        for row in range(1, 6):
            tokens = prompt(row, 6)
            if row in (2, 4):
                tokens[-1] = BAD_TOKEN - row // 4
            plans.admit(row, tokens, WISHES[wish])
        results = [plans.step(extends=[(row, 6) for row in range(1, 6)])]
        return results + [plans.step(decodes=[5, 1, 3]) for _ in range(4)]

    clean = run({})
    poisoned = run({BAD_TOKEN: float("nan"), BAD_TOKEN - 1: float("inf")})
    assert poisoned[0].failed == (1, 3)
    assert clean[0].failed == ()
    for i in (0, 2, 4):
        assert poisoned[0].token_ids[i] == clean[0].token_ids[i]
        if clean[0].logprobs:
            assert poisoned[0].logprobs is not None
            assert poisoned[0].logprobs[i] == clean[0].logprobs[i]
            assert [poisoned[0].logprobs[j] for j in (1, 3)] == [None, None]
    assert poisoned[1:] == clean[1:]


def test_a_decode_whose_logits_are_not_finite_fails_alone():
    """C27"""

    def run(last_token: int | None) -> StepResult:
        model = FakeModel()
        model.poison = {BAD_TOKEN: float("nan")}
        plans = planner(fake_runner(model))
        for row in (1, 2, 3):
            plans.admit(row, prompt(row, 6), WISHES["greedy"])
        plans.step(extends=[(row, 6) for row in (1, 2, 3)])
        if last_token is not None:
            plans.runner.rows.last_tokens[2] = last_token
        return plans.step(decodes=[1, 2, 3])

    clean, broken = run(None), run(BAD_TOKEN)
    assert (clean.failed, broken.failed) == ((), (1,))
    assert [broken.token_ids[i] for i in (0, 2)] == [clean.token_ids[i] for i in (0, 2)]


def test_a_prompt_position_that_is_not_finite_has_no_entry_and_the_others_have_theirs():
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    tokens = prompt(1, 9)
    tokens[4] = BAD_TOKEN
    model = FakeModel()
    clean_plans = planner(fake_runner())
    clean_plans.admit(1, tokens, params)
    clean = clean_plans.step(extends=[(1, 9)])
    model.poison = {BAD_TOKEN: float("nan")}
    plans = planner(fake_runner(model))
    plans.admit(1, tokens, params)
    result = plans.step(extends=[(1, 9)])
    assert clean.prompt_logprobs is not None
    assert result.prompt_logprobs is not None
    expected = list(clean.prompt_logprobs[0])
    expected[4] = None
    assert result.prompt_logprobs[0] == expected
    assert (clean.failed, result.failed) == ((), (0,))


def spoil(runner: ModelRunner, live: dict[int, int], pages: np.ndarray) -> None:
    """NaN wherever no live row has KV, pages from nowhere in the entries that no live row uses."""
    used = {int(pages[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
            for row, length in live.items() for position in range(length)}  # fmt: skip
    free = torch.tensor(sorted(set(range(len(runner.cache.kv(0).k))) - used))
    for tensor in runner.cache.kv(0)[:2]:
        tensor.index_fill_(0, free, float("nan"))
    for row in range(NUM_ROWS + 1):
        first_unused = -(-live.get(row, 0) // PAGE_SIZE)
        runner.rows.req_to_token[row, first_unused:] = NUM_ROWS * PAGES_PER_ROW
        if row not in live:
            for name in type(runner.rows).declared.keys() - {"req_to_token"}:
                runner.rows[name][row] = 55


@pytest.mark.parametrize("wish", WISHES)
def test_garbage_in_the_padding_freed_pages_and_unused_entries_changes_no_live_row(wish):
    """C5, C14"""

    def run(spoiled: bool) -> list[StepResult]:
        plans = planner(fake_runner())
        for row in (1, 2, 4):
            plans.admit(row, prompt(row), WISHES[wish])
        results = [plans.step(extends=[(1, 7), (2, 7), (4, 7)])]
        for _ in range(5):
            if spoiled:
                spoil(plans.runner, {1: int(plans.lens[1]), 4: int(plans.lens[4])}, plans.pages)
            results.append(plans.step(decodes=[4, 1]))
        return results

    assert run(spoiled=True) == run(spoiled=False)


def assert_padding_holds(runner: ModelRunner) -> None:
    """What a step writes there is scratch, a token of the vocabulary and finite KV; everything else holds its pads."""
    for name, column in type(runner.rows).declared.items():
        if name not in ("last_tokens", "kv_lens"):
            assert (runner.rows[name][0] == column.pad).all(), name
    assert 0 <= runner.rows.last_tokens[0] < VOCAB
    assert 0 <= runner.rows.kv_lens[0] <= CONTEXT, "what one step's padding came to: it does not add up"
    for side in runner.cache.kv(0)[:2]:
        assert side[:PAGE_SIZE].isfinite().all()


def test_the_padding_row_and_page_hold_their_pads_or_finite_scratch_after_every_step():
    """C1, C14"""
    runner = fake_runner()
    runner.warm_up()
    assert_padding_holds(runner)
    plans = planner(runner)
    for row in (1, 2, 3):
        plans.admit(row, prompt(row), EVERYTHING)
    plans.step(extends=[(1, 7), (2, 3)])
    assert_padding_holds(runner)
    plans.step(extends=[(2, 4), (3, 7)], decodes=[1])
    assert_padding_holds(runner)
    for _ in range(5):
        plans.step(decodes=[3, 1, 2])
        assert_padding_holds(runner)


def test_nothing_is_left_of_the_warm_up():
    runner = fake_runner()
    runner.warm_up()
    plans = planner(runner, seed=2)
    plans.admit(2, prompt(2), EVERYTHING)
    warm = [plans.step(extends=[(2, 7)])] + [plans.step(decodes=[2]) for _ in range(4)]
    assert warm == run_alone(2, EVERYTHING, prompt(2), steps=4)


def test_a_row_handed_to_the_next_request_keeps_nothing_of_the_last():
    plans = planner(fake_runner(), seed=2)
    plans.admit(2, prompt(5, 12), EVERYTHING)
    plans.step(extends=[(2, 12)])
    plans.step(decodes=[2])
    plans.admit(2, prompt(2), WISHES["greedy"])
    later = [plans.step(extends=[(2, 7)])] + [plans.step(decodes=[2]) for _ in range(4)]
    assert later == run_alone(2, WISHES["greedy"], prompt(2), steps=4)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("kept", [1, 3])
def test_a_request_goes_on_after_a_retraction_as_if_there_had_been_none(wish, kept):
    """C26: recomputed in another row, from its prompt and the tokens it had."""
    steady = run_alone(1, WISHES[wish], prompt(1), steps=6)
    said = tokens_of(steady)
    plans = planner(fake_runner())
    plans.admit(5, prompt(1) + said[:kept], WISHES[wish], num_prompt=7)
    again = [plans.step(extends=[(5, 7 + kept)])] + [plans.step(decodes=[5]) for _ in range(6 - kept)]
    assert tokens_of(again) == said[kept:]
    assert [result.logprobs for result in again] == [result.logprobs for result in steady[kept:]]


def test_a_step_of_nobody_samples_nothing():
    plans = planner(fake_runner())
    plans.admit(1, prompt(1), WISHES["greedy"])
    assert plans.step(extends=[(1, 4)]) == StepResult(token_ids=[])


def test_a_context_can_be_filled_to_its_last_position():
    plans = planner(fake_runner())
    plans.admit(1, prompt(1, CONTEXT - 2), WISHES["greedy"])
    assert plans.step(extends=[(1, CONTEXT - 2)]).failed == ()
    assert [plans.step(decodes=[1]).failed for _ in range(2)] == [(), ()]
