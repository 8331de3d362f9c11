"""Speculation changes no token (C16): what decodes with drafts say and leave is what plain decodes do, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.runtime.graphs.backends import CpuGraphs, Eager
from forebay.runtime.host.bounds import IndexOutOfPool
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.runtime import fake_model
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import FakeModel, fake_runner, planner
from tests.runtime.graph_steps import poison
from tests.runtime.readbacks import readbacks
from tests.runtime.test_model_runner import BAD_TOKEN, assert_padding_holds, prompt
from tests.runtime.verifying import (
    EVERYTHING,
    GREEDY,
    WISHES,
    assert_same,
    begin,
    decode,
    drafters,
    plainly,
    with_drafts,
)

WIDTH, STEPS = 4, 16
PROMPTS = {row: random_ids(3 + 2 * row, seed=row) for row in (1, 2, 4)}
# Attention and Mamba-2, Mamba-1 and experts, delta nets, latent KV, states alone, convolutions and windows, windows.
CASES = ("llama", "falcon_h1", "jamba", "qwen3_next", "glm_moe_dsa", "mamba2", "lfm3", "gpt_oss")
DRAFTERS = drafters(VOCAB, WIDTH - 1)

pytestmark = pytest.mark.usefixtures("native_ops")


@pytest.fixture(scope="module")
def paths() -> Callable[[str], Path]:
    return lambda case: shared_tiny(case).path


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_c16_drafts_change_no_bit_of_what_a_model_says_and_keeps(case, dtype, native_ops, paths):
    """Whatever is drafted, in ragged company, padded and captured or not, drawn and penalized as well."""
    model = models.load(open_checkpoint(paths(case)), ops=native_ops, dtype=dtype)

    def make(width: int, **options: object) -> HybridPlanner:
        runner = hybrid_runner(model, vocab_size=VOCAB, dtype=dtype, ops=native_ops, width=width, **options)
        return HybridPlanner(runner, seed=width)

    params = {1: WISHES["greedy"], 2: WISHES["drawn"], 4: WISHES["everything"]}
    plain = plainly(make(1), PROMPTS, params, STEPS)
    for seed, (draft, options) in enumerate([*((name, {}) for name in DRAFTERS), ("mixed", {"graphs": Eager()})]):
        plans = make(WIDTH, **options)
        if not options:
            plans.runner.verify.captured.sizes = [5, 14]
        said = with_drafts(plans, PROMPTS, params, plain, DRAFTERS[draft], seed)
        assert_same(plans, said, plain, PROMPTS)


@pytest.mark.quick(7)
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("draft", DRAFTERS)
def test_c16_every_wish_is_granted_as_without_drafts(wish, draft):
    """Of a fake that keeps all there is to keep, where garbage lies wherever nobody has anything."""
    params = dict.fromkeys(PROMPTS, WISHES[wish])
    prompts = {row: prompt(row, 2 + row) for row in PROMPTS}
    plain = plainly(HybridPlanner(hybrid_runner()), prompts, params, STEPS)
    plans = HybridPlanner(hybrid_runner(width=WIDTH), seed=3)
    drafter = drafters(fake_model.VOCAB - 2, WIDTH - 1)[draft]

    def spoil(plans: HybridPlanner) -> None:
        plans.poison(list(prompts))
        poison(plans.runner.verify.captured._inputs.sequences)
        plans.runner.rows.last_tokens[PAD] = 5
        plans.runner.rows.kv_lens[PAD] = 9

    said = with_drafts(plans, prompts, params, plain, drafter, 7, spoil=spoil)
    assert_same(plans, said, plain, prompts)


def test_right_drafts_are_all_accepted_and_wrong_ones_cost_nothing():
    plans = planner(fake_runner(width=WIDTH))
    plans.admit(1, prompt(1))
    plans.admit(2, prompt(2))
    alone = planner(fake_runner())
    for row in (1, 2):
        alone.admit(row, prompt(row))
    known = [alone.step(extends=[(1, 7), (2, 7)])] + [alone.step(decodes=[1, 2]) for _ in range(9)]
    first, second = ([result.token_ids[i] for result in known] for i in range(2))
    assert plans.step(extends=[(1, 7), (2, 7)]).token_ids == [first[0], second[0]]
    result = plans.step(decodes=[(1, first[1:4]), (2, [second[1], 9, second[3]])])
    assert (result.token_ids, result.num_new) == ([*first[1:5], *second[1:3]], [4, 2])
    result = plans.step(decodes=[2, (1, [first[5] ^ 1])])
    assert (result.token_ids, result.num_new) == ([second[3], first[5]], [1, 1])
    assert plans.step(decodes=[2, 1]).token_ids == [second[4], first[6]]
    plans.admit(3, prompt(3))
    result = plans.step(extends=[(3, 7)], decodes=[1, 2])
    assert result.token_ids[1:] == [first[7], second[5]]


@pytest.mark.quick(2)
@pytest.mark.parametrize("nonsense", [-1, fake_model.VOCAB, 2**62, -(2**62)])
def test_guesses_on_the_device_that_are_no_tokens_are_no_drafts(nonsense):
    """Nobody on the host has seen them: they are no index, and never accepted."""
    plans = HybridPlanner(hybrid_runner(width=WIDTH))
    prompts, params = {1: prompt(1), 2: prompt(2)}, {1: EVERYTHING, 2: GREEDY}
    plain = plainly(HybridPlanner(hybrid_runner()), prompts, params, STEPS)
    said = begin(plans, prompts, params)
    drafts = plans.runner.rows.draft_tokens
    for _ in range(3):
        done = {row: len(said.tokens[row]) for row in prompts}
        drafts[1] = torch.tensor([plain.tokens[1][done[1]], nonsense, plain.tokens[1][done[1] + 2]])
        drafts[2] = nonsense
        decode(plans, said, [(1, 3), (2, 2)])
        assert {row: len(said.tokens[row]) - done[row] for row in prompts} == {1: 2, 2: 1}
    assert_same(plans, said, plain, prompts)


def test_depth_one_gives_what_depth_zero_gives():
    """The next step is launched before anybody knows how many tokens the one before has accepted."""
    alone = planner(fake_runner())
    for row in (1, 2):
        alone.admit(row, prompt(row), WISHES["everything"])
    known = [alone.step(extends=[(1, 7), (2, 7)])] + [alone.step(decodes=[1, 2]) for _ in range(13)]
    said = {row: [result.token_ids[i] for result in known] for i, row in enumerate((1, 2))}
    plans = planner(fake_runner(width=3))
    for row in (1, 2):
        plans.admit(row, prompt(row), WISHES["everything"])
    before, got = plans.launch(extends=[(1, 7), (2, 7)]), {1: [], 2: []}
    for step in range(5):
        rows = (1, 2) if step % 2 else (2, 1)
        drafts = plans.runner.rows.draft_tokens
        drafts[1], drafts[2] = torch.tensor([said[1][2 * step + 1], 3]), torch.tensor([3, 3])
        following = plans.launch(decodes=[(row, 2) for row in rows])
        for row, tokens in split(before.result(), (1, 2) if step in (0, 2, 4) else (2, 1)).items():
            got[row] += tokens
        before = following
    assert got[1][:3] == said[1][:3]
    assert all(tokens == said[row][: len(tokens)] for row, tokens in got.items())


def split(result: StepResult, rows: tuple[int, ...]) -> dict[int, list[int]]:
    tokens = iter(result.token_ids)
    return {row: [next(tokens) for _ in range(n)] for row, n in zip(rows, result.num_new or [1, 1], strict=True)}


@pytest.mark.parametrize("wish", ["greedy", "drawn", "penalized"])
def test_what_is_not_finite_harms_its_own_sequence_and_only_if_it_counts(wish):
    """C27, C30: behind the first rejection it harms nobody, at an accepted position it fails the sequence."""

    def run(poisoned: bool, drafts: dict[int, list[int]]) -> StepResult:
        model = FakeModel()
        plans = planner(fake_runner(model, width=WIDTH))
        for row in (1, 2, 3):
            plans.admit(row, prompt(row), WISHES[wish])
        first = plans.step(extends=[(row, 7) for row in (1, 2, 3)])
        if poisoned:
            model.poison = {BAD_TOKEN: float("nan"), first.token_ids[1]: float("inf")}
        return plans.step(decodes=[(row, drafts[row]) if row in drafts else row for row in (1, 2, 3)])

    clean = run(False, {})
    broken = run(True, {1: [BAD_TOKEN, 5], 2: [3, 3, 3]})
    assert broken.num_new == [1, 1, 1]
    assert broken.failed == (1,)
    assert [broken.token_ids[i] for i in (0, 2)] == [clean.token_ids[i] for i in (0, 2)]
    if clean.logprobs:
        assert [broken.logprobs[i] for i in (0, 2)] == [clean.logprobs[i] for i in (0, 2)]


def test_a_failure_at_an_accepted_position_ends_what_is_accepted():
    plans = planner(fake_runner(model := FakeModel(), width=WIDTH))
    plans.admit(1, prompt(1))
    alone = planner(fake_runner())
    alone.admit(1, prompt(1))
    said = [alone.step(extends=[(1, 7)]).token_ids[0]] + [alone.step(decodes=[1]).token_ids[0] for _ in range(3)]
    plans.step(extends=[(1, 7)])
    assert said[1] != said[0]
    model.poison = {said[1]: float("nan")}
    result = plans.step(decodes=[(1, said[1:])])
    assert result.failed == (0,)
    assert result.num_new == [2]
    assert result.token_ids[0] == said[1]
    assert 0 <= plans.runner.rows.last_tokens[1] < fake_model.VOCAB


@pytest.mark.parametrize(
    ("params", "expected"), [(WISHES["everything"], 1), (SamplingParams(temperature=0.0), 1), (GREEDY, 2)]
)
def test_a_verify_reads_back_what_was_sampled_and_nothing_else(params, expected):
    """C11"""
    plans = planner(fake_runner(width=WIDTH))
    for row in (1, 2, 3):
        plans.admit(row, range(row, row + 6), params)
    plans.step(extends=[(1, 6), (2, 6), (3, 6)])
    with readbacks() as launching:
        launched = plans.launch(decodes=[(1, [4, 5]), 3, (2, [6])])
    assert launching == []
    with readbacks() as waiting:
        launched.result()
    assert waiting == ["numpy"] * expected


def test_c14_the_padding_holds_however_often_a_verify_is_replayed(native_ops):
    runner = fake_runner(width=WIDTH)
    runner.verify.captured.sizes = [6]
    runner.warm_up()
    plans = planner(runner)
    for row in (1, 2):
        plans.admit(row, prompt(row), EVERYTHING)
    plans.step(extends=[(1, 7), (2, 7)])
    left = set()
    for i in range(5):
        runner.rows.last_tokens[PAD], runner.rows.kv_lens[PAD] = 5 + i, 3 * i
        plans.step(decodes=[(1, [3]), (2, [4, 5])])
        assert_padding_holds(runner)
        left.add((int(runner.rows.last_tokens[PAD]), int(runner.rows.kv_lens[PAD])))
    assert len(left) == 1, "the padding row begins with the same token and length each time"


def test_c13_padded_tokens_of_a_verify_are_nobodys():
    runner = hybrid_runner(width=WIDTH)
    inputs = runner.verify.captured._inputs
    poison(inputs.sequences)
    inputs.fill({name: torch.ones(2, dtype=torch.int64) for name in inputs.columns}, 2, 5)
    padded = inputs.head(5)
    assert set(padded["q_ends"][2:].tolist()) == {5}
    for name in ("req_pool_indices", "state_slots", "write_slots", "mamba_track_indices", "mamba_track_lens"):
        assert set(padded[name][2:].tolist()) == {PAD}, name


@pytest.mark.parametrize("wished", [8, 9, 10, 11, 30])
def test_c18_a_wished_state_is_taken_if_the_accepted_tokens_come_to_its_length(wished):
    """At exactly that length, of rows with and without drafts; else the slot stays what it was."""
    prompts, params = {1: prompt(1, 7), 2: prompt(2, 7)}, {1: GREEDY, 2: EVERYTHING}
    plain = plainly(HybridPlanner(hybrid_runner()), prompts, params, STEPS)
    plans = HybridPlanner(hybrid_runner(width=WIDTH))
    said = begin(plans, prompts, params)
    tables = plans.runner.cache.tables["state"]
    for tensor in tables.tensors:
        tensor[8:10] = 55.0
    future = plain.tokens[1][1:3]
    plan = plans.plan(decodes=[(1, [*future, 3]), 2], snapshots=[(1, wished, 8), (2, wished, 9)])
    said.add(plans, plan, plans.settle(plan, plans.runner.launch(plan).result()))
    for row, slot, come_to in ((1, 8, range(8, 11)), (2, 9, range(8, 9))):
        for i, tensor in enumerate(tables.tensors):
            if wished in come_to:
                assert torch.equal(tensor[slot], plain.states[row][wished - 7][i])
            else:
                assert (tensor[slot] == 55.0).all()
    assert_same(plans, said, plain, prompts)


def test_c18_a_wish_that_only_the_most_likely_tokens_come_to_is_not_granted():
    """A row that draws others does not come to it, and the slot keeps what it had."""
    plans = HybridPlanner(hybrid_runner(width=WIDTH))
    said = begin(plans, {1: prompt(1, 7)}, {1: SamplingParams(temperature=30.0, seed=1)})
    likely = begin(HybridPlanner(hybrid_runner()), {1: [*prompt(1, 7), *said.tokens[1]]}, {1: GREEDY}).tokens[1]
    tables = plans.runner.cache.tables["state"]
    for tensor in tables.tensors:
        tensor[8] = 55.0
    plan = plans.plan(decodes=[(1, likely)], snapshots=[(1, 9, 8)])
    result = plans.runner.launch(plan).result()
    assert result.num_new == [1], "the case is one where another is drawn"
    assert all((tensor[8] == 55.0).all() for tensor in tables.tensors)


def test_more_drafts_than_there_is_room_for_are_refused():
    plans = planner(fake_runner(width=2))
    plans.admit(1, prompt(1))
    plans.step(extends=[(1, 7)])
    with pytest.raises(IndexOutOfPool, match="q_lens"):
        plans.step(decodes=[(1, [3, 4])])


def test_every_number_of_tokens_is_captured_in_idle_time(native_ops):
    runner = fake_runner(width=WIDTH, ops=native_ops)
    assert isinstance(runner.verify.captured.backend, CpuGraphs)
    while runner.capture_next():
        pass
    assert sorted(runner.verify.captured.graphs) == runner.verify.captured.sizes
    assert fake_runner(ops=native_ops).verify is None
