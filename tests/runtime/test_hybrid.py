"""The model runner on a fake hybrid, whose logits show every mistake with states, windows and host copies."""

from __future__ import annotations

import pytest
import torch

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.host.host_copies import NoHostCopy
from tests.pools.caches import all_tensors
from tests.runtime.fake_hybrid import NUM_SLOTS, FakeHybrid, HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS, PAGE_SIZE
from tests.runtime.readbacks import readbacks
from tests.runtime.test_model_runner import assert_padding_holds, prompt, tokens_of

SPARE = range(NUM_ROWS + 1, NUM_SLOTS + 1)

pytestmark = pytest.mark.usefixtures("native_ops")


def planner(seed: int = 0) -> HybridPlanner:
    return HybridPlanner(hybrid_runner(), seed=seed)


def run_alone(tokens: list[int], steps: int, *, seed: int = 0) -> list[StepResult]:
    plans = planner(seed)
    plans.begin(1, tokens)
    return [plans.step(extends=[(1, len(tokens))])] + [plans.step(decodes=[1]) for _ in range(steps)]


def entries(results: list[StepResult], index: int = 0) -> list[object]:
    return [result.logprobs and result.logprobs[index] for result in results]


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [4, 4, 5], [6, 7], [12, 1]])
def test_states_and_windows_do_not_depend_on_chunks_or_company(chunks):
    """C28: on other pages, window pages and slots too."""
    alone = run_alone(prompt(1, 13), steps=6)
    plans = planner(seed=5)
    plans.slots[4], plans.slots[2] = SPARE[2], 4
    plans.begin(2, prompt(2, 9))
    plans.step(extends=[(2, 5)])
    plans.begin(4, prompt(1, 13))
    plans.begin(5, prompt(5, 15))
    for chunk in chunks:
        last = plans.step(extends=[(5, 1), (4, chunk)], decodes=[])
    plans.step(extends=[(2, 4)])
    together = [last] + [plans.step(decodes=[2, 4]) for _ in range(6)]
    assert entries(together[:1]) == entries(alone[:1])
    assert entries(together[1:], 1) == entries(alone[1:])


def test_garbage_in_whatever_is_free_changes_nothing():
    """C5, C14: slot 0 and window page 0 are nobody's, and no row reads what its window has moved past."""
    alone = run_alone(prompt(1, 13), steps=12)
    plans = planner(seed=3)
    plans.begin(3, prompt(1, 13))
    plans.begin(2, prompt(2))
    results = []
    for extends, decodes in [([(3, 8), (2, 7)], []), ([(3, 5)], [2])] + [([], [3])] * 12:
        plans.poison([3])
        results.append(plans.step(extends=extends, decodes=decodes))
    plans.poison([3])
    assert entries(results[1:]) == entries(alone)


def test_a_slot_that_is_used_again_holds_nothing_of_the_last_request():
    """C6"""
    plans = planner()
    for row in (1, 2):
        plans.begin(row, prompt(7, 11))
        plans.step(extends=[(row, 11)])
    plans.slots[3], plans.slots[2] = plans.slots[2], 3
    plans.begin(3, prompt(1, 13))
    results = [plans.step(extends=[(3, 13)])] + [plans.step(decodes=[3]) for _ in range(3)]
    assert entries(results) == entries(run_alone(prompt(1, 13), steps=3))


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_request_goes_on_from_a_snapshot_inside_a_step(length):
    """C6, C18: the state comes from the middle of a chunk, the KV and the window from shared pages; twice, as the copy
    leaves the snapshot what it was."""
    tokens = prompt(1, length)
    plans = planner()
    plans.begin(1, tokens + prompt(3, 3))
    plans.begin(2, prompt(2, 9))
    snapshots = [(2, n, SPARE[n]) for n in (1, 2, 5)] + [(1, length - 1, SPARE[0]), (1, length, SPARE[3])]
    plans.step(extends=[(2, 5), (1, length + 3 if length < 8 else length)], snapshots=snapshots)
    for row, more in ((4, 1), (5, 3)):
        whole = tokens + prompt(row, more)
        plans.begin_from(row, whole, 1, length, SPARE[3])
        got = [plans.step(extends=[(row, more)])] + [plans.step(decodes=[row]) for _ in range(3)]
        assert entries(got) == entries(run_alone(whole, steps=3))


@pytest.mark.quick(2)
@pytest.mark.parametrize("said", [0, 1, 5])
@pytest.mark.parametrize("num_prompt", [3, 8, 13])
def test_a_retracted_request_goes_on_elsewhere_with_what_was_kept_on_the_host(num_prompt, said):
    """C26: every byte of what it had is overwritten meanwhile; a second time, too."""
    tokens = prompt(1, num_prompt)
    alone = run_alone(tokens, steps=said + 6)
    plans = planner()
    plans.begin(1, tokens)
    got = [plans.step(extends=[(1, num_prompt)])] + [plans.step(decodes=[1]) for _ in range(said)]
    row = 1
    for to in (5, 2):
        plans.save(row)
        plans.begin(3, prompt(3))
        plans.step(extends=[(3, 7)])  # saved before what this step does
        assert plans.runner.inputs.copies.num_bytes > 0
        plans.poison([3])
        plans.load(to, row, tokens + tokens_of(got))
        got.append(plans.step(extends=[(to, 1)], decodes=[3]))
        got += [plans.step(decodes=[to]) for _ in range(2)]
        assert plans.runner.inputs.copies.num_bytes == 0
        row = to
    assert entries(got) == entries(alone)


def test_a_row_and_slot_may_go_on_to_the_next_request_in_the_step_that_saves_them():
    """Saves come before clears, copies and the model."""
    plans = planner()
    plans.begin(1, prompt(1, 13))
    got = [plans.step(extends=[(1, 13)])]
    plans.save(1)
    plans.begin(1, prompt(6, 14))
    plans.step(extends=[(1, 14)])
    plans.load(4, 1, prompt(1, 13) + tokens_of(got))
    got += [plans.step(extends=[(4, 1)], decodes=[1]), plans.step(decodes=[4])]
    assert entries(got) == entries(run_alone(prompt(1, 13), steps=2))


def test_saves_and_loads_may_share_a_step():
    plans = planner()
    for row in (1, 2):
        plans.begin(row, prompt(row, 10))
    first = plans.step(extends=[(1, 10), (2, 10)])
    plans.save(1)
    plans.save(2)
    plans.load(3, 2, [*prompt(2, 10), first.token_ids[1]])
    got = plans.step(extends=[(3, 1)])
    plans.load(2, 1, [*prompt(1, 10), first.token_ids[0]])
    assert entries([got]) == entries(run_alone(prompt(2, 10), steps=1)[1:])
    assert entries([plans.step(extends=[(2, 1)])]) == entries(run_alone(prompt(1, 10), steps=1)[1:])


def test_a_step_of_nobody_does_what_comes_before_the_model():
    plans = planner()
    plans.begin(1, prompt(1, 10))
    first = plans.step(extends=[(1, 10)])
    plans.save(1)
    assert plans.step().token_ids == []
    plans.poison([])
    plans.load(3, 1, [*prompt(1, 10), *first.token_ids])
    plans.begin(2, prompt(2))
    assert plans.step().token_ids == []
    got = plans.step(extends=[(3, 1), (2, 7)])
    assert entries([got]) == entries(run_alone(prompt(1, 10), steps=1)[1:])
    assert entries([got], 1) == entries(run_alone(prompt(2), steps=0))


def test_the_bytes_on_the_host_are_those_of_the_copies_there():
    plans = planner()
    for row in (1, 2):
        plans.begin(row, prompt(row, 10))
    plans.step(extends=[(1, 10), (2, 10)])
    plans.save(1)
    plans.step(decodes=[2])
    per_page, state = 2 * PAGE_SIZE * 8 * 4, (8 * 2 + 2 * 8) * 4
    assert plans.runner.inputs.copies.num_bytes == 3 * per_page + 2 * per_page + state
    plans.drops += [1, 77]
    plans.step(decodes=[2])
    assert plans.runner.inputs.copies.num_bytes == 0


def test_a_load_of_nothing_fails_its_step_and_changes_nothing():
    """C27"""
    plans = planner()
    plans.begin(1, prompt(1, 9))
    plans.begin(2, prompt(2, 9))
    got = [plans.step(extends=[(1, 9), (2, 9)])]
    plans.save(2)
    plans.step(decodes=[1])
    plans.drops.append(2)
    plans.load(3, 2, prompt(2, 9))
    tables = [
        plans.runner.rows.req_to_token,
        plans.runner.cache.page_maps["window"],
        *plans.runner.cache.tables["state"].tensors,
    ]
    before = [table.clone() for table in tables]
    with pytest.raises(NoHostCopy, match=r"\[2\]"):
        plans.step(decodes=[3])
    assert all(torch.equal(table, was) for table, was in zip(tables, before, strict=True))
    assert plans.runner.inputs.copies.num_bytes > 0  # not even dropped
    assert entries([*got, plans.step(decodes=[1])][1:]) == entries(run_alone(prompt(1, 9), steps=2)[2:])


@pytest.mark.parametrize(("slot", "what"), [(1, "more than once"), (1 << 20, "1048576")], ids=["twice", "none such"])
def test_a_plan_with_a_slot_too_many_changes_nothing(slot, what):
    plans = planner()
    plans.begin(1, prompt(1, 9))
    plans.begin(2, prompt(2, 9))
    plans.step(extends=[(1, 9), (2, 9)])
    before = [tensor.clone() for tensor in plans.runner.cache.tables["state"].tensors]
    plans.slots[2] = plans.slots[1] if slot == 1 else slot
    with pytest.raises(IndexOutOfPool, match=what):
        plans.step(decodes=[1, 2])
    assert all(torch.equal(*pair) for pair in zip(plans.runner.cache.tables["state"].tensors, before, strict=True))


def test_depth_one_gives_what_depth_zero_gives():
    """A request is saved and its slot, pages and windows are handed on while its last step is in flight."""

    def run(overlap: bool) -> list[StepResult]:
        plans = planner()
        plans.begin(1, prompt(1, 9))
        plans.begin(2, prompt(2, 9))
        steps = [([(1, 9), (2, 9)], []), ([], [1, 2]), ([], [1]), ([(2, 11)], [1]), ([], [2, 1])]
        launched, results = [], []
        for i, (extends, decodes) in enumerate(steps):
            if i == 2:
                plans.save(2)
            if i == 3:
                plans.begin(2, prompt(4, 11))
            launched.append(plans.launch(extends, decodes))
            if len(launched) > int(overlap):
                results.append(launched.pop(0).result())
        return results + [step.result() for step in launched]

    assert run(overlap=True) == run(overlap=False)


def test_nothing_is_left_of_the_warm_up():
    """C14"""
    plans = planner()
    plans.runner.warm_up()
    assert_padding_holds(plans.runner)
    for tensor in all_tensors(plans.runner.cache):
        assert not tensor.any()
    assert not plans.runner.cache.page_maps["window"].any()
    plans.begin(1, prompt(1, 9))
    warm = [plans.step(extends=[(1, 9)])] + [plans.step(decodes=[1]) for _ in range(3)]
    assert warm == run_alone(prompt(1, 9), steps=3)


class WithoutReading(FakeHybrid):
    """Reads nothing back, as the real models do not."""

    def forward(self, ctx, input_ids):
        return torch.cat([self._embedding.index_select(0, input_ids), torch.zeros(len(input_ids), 1)], dim=1)


def test_a_step_with_states_windows_and_snapshots_reads_back_its_tokens_alone():
    """C11; with host copies it reads those, and the scheduling path waits for none of them."""
    plans = HybridPlanner(hybrid_runner(WithoutReading()))
    for row in (1, 2, 3):
        plans.begin(row, prompt(row))
    plans.step(extends=[(1, 7), (2, 7), (3, 7)])
    with readbacks() as launching:
        launched = [plans.launch(decodes=[1, 2, 3], snapshots=[(1, 8, SPARE[0]), (3, 8, SPARE[1])])]
        plans.save(2)
        plans.begin_from(4, prompt(1, 12), 1, 8, SPARE[0])
        plans.begin(5, prompt(5))
        launched.append(plans.launch(extends=[(4, 4), (5, 7)], decodes=[1]))
        plans.load(6, 2, prompt(2, 9))
        launched.append(plans.launch(extends=[(6, 1)]))
    assert launching == []
    with readbacks() as waiting:
        for step in launched:
            step.result()
    assert set(waiting) == {"numpy"}


def test_c18_a_wish_that_only_the_most_likely_tokens_come_to_leaves_its_slot_alone():
    """The slot may hold the only state that the request could go on from."""
    drawn = SamplingParams(temperature=50.0, seed=3)
    plans = HybridPlanner(hybrid_runner(width=4))
    plans.begin(1, prompt(1, 9), drawn)
    first = plans.step(extends=[(1, 9)], snapshots=[(1, 8, SPARE[0])]).token_ids
    likely = tokens_of(run_alone(prompt(1, 9) + first, steps=2))
    states = plans.runner.cache.tables["state"]
    before = [tensor[SPARE[0]].clone() for tensor in states.tensors]
    result = plans.step(decodes=[(1, likely)], snapshots=[(1, 12, SPARE[0])])
    assert result.num_new == [1]
    assert all(torch.equal(tensor[SPARE[0]], was) for tensor, was in zip(states.tensors, before, strict=True))
