"""An assistant's drafts in a captured step are those that it makes of each row alone (C13-C15, C17)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from forebay.models.assistant import Assistant
from forebay.ops import Ops
from forebay.pools.regions import Regions
from forebay.pools.request_rows import RequestRows
from forebay.requests.step_plan import StepPlan
from forebay.runtime.drafts.frozen import FrozenDraft
from forebay.runtime.graphs.backends import Eager, GraphBackend, graphs_for
from forebay.runtime.host.packing import Sections
from forebay.runtime.steps.forward import Forward
from tests.models.assistants import CENTROIDS, load_for, make_assistant, our_drafts
from tests.models.drive import NUM_ROWS, Driver
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.pools.caches import all_tensors
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.verifying import WISHES, Said, assert_same, begin, decode, plainly

TARGET = "gemma4_text"
MOST = 4
LENGTHS = {1: 2, 2: 9, 3: 40, 4: 5, 5: 17, 6: 33}


class Drafting(NamedTuple):
    model: Model
    assistant: Assistant
    driver: Driver
    rows: RequestRows
    frozen: FrozenDraft


@pytest.fixture(scope="module", params=[{}, CENTROIDS], ids=["every token", "centroids"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    make_assistant(folder, **request.param)
    return folder


@pytest.fixture
def drafting(path: Path, ops: Ops, request: pytest.FixtureRequest) -> Drafting:
    return made(path, ops, graphs_for(ops, "cpu", Regions()))


def ids_of(row: int) -> list[int]:
    return random_ids(LENGTHS[row], seed=row)


@torch.inference_mode()
def made(path: Path, ops: Ops, backend: GraphBackend) -> Drafting:
    """Rows as they are behind a step that has sampled: all their tokens but the last have KV."""
    model = models.load(open_checkpoint(shared_tiny(TARGET).path), ops=ops, dtype=torch.float32)
    assistant, driver = load_for(TARGET, path, ops), Driver(model)
    driver.window_table = driver.page_table
    page_map = driver.cache.page_maps["window"]
    page_map.copy_(torch.arange(len(page_map)))
    driver.cache.reset_padding()
    rows = RequestRows(NUM_ROWS, driver.page_table.shape[1], num_drafts=MOST)
    rows.req_to_token.copy_(driver.page_table)
    forward = Forward(model, ops, rows, driver.cache)
    frozen = FrozenDraft(forward, assistant, sizes=[1, 2, 4, NUM_ROWS], backend=backend)
    for row in LENGTHS:
        ids = ids_of(row)
        ctx, input_ids = driver.inputs([(row, ids[:-1])])
        q_start = torch.tensor([0, len(input_ids)], dtype=torch.int32)
        frozen.keep(int32(row), model.forward(ctx, input_ids), q_start, torch.tensor([len(input_ids)]))
        rows.kv_lens[row], rows.last_tokens[row] = len(ids) - 1, ids[-1]
    return Drafting(model, assistant, driver, rows, frozen)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drafts(drafting: Drafting, batch: list[int], count: int = MOST) -> Tensor:
    """[rows, count]"""
    (drafted,) = drafting.frozen.runners[count - 1].run({"drafting_rows": int32(*batch)}, len(batch))
    return drafted


@pytest.mark.quick(4)
@pytest.mark.parametrize("captured", [False, True])
@torch.inference_mode()
def test_a_step_drafts_for_each_row_what_it_would_alone(captured, path, ops):
    drafting = made(path, ops, graphs_for(ops, "cpu", Regions()) if captured else Eager())
    expected = {row: our_drafts(drafting.model, drafting.assistant, ids_of(row)) for row in LENGTHS}
    if captured:
        while drafting.frozen.capture_next():
            pass
    for batch in ([3], [6, 1], [2, 5, 4], [1, 2, 3, 4, 5, 6], [4]):
        for count in range(1, MOST + 1):
            drafting.rows.draft_tokens.fill_(-1)
            drafted = drafts(drafting, batch, count)
            for row, found in zip(batch, drafted.tolist(), strict=True):
                assert found == expected[row][:count], (batch, count, row)
                assert drafting.rows.draft_tokens[row].tolist() == [*found, *[-1] * (MOST - count)]
            others = [row for row in LENGTHS if row not in batch]
            assert (drafting.rows.draft_tokens[others] == -1).all()


@torch.inference_mode()
def test_a_draft_writes_no_kv_and_takes_no_row_further(drafting):
    def held() -> list[Tensor]:
        tables = (drafting.rows.kv_lens, drafting.rows.last_tokens, drafting.frozen.kept["hidden"])
        return [tensor.clone() for tensor in (*all_tensors(drafting.driver.cache), *tables)]

    before = held()
    for _ in range(3):
        drafts(drafting, [2, 3, 5])
    for after, was in zip(held(), before, strict=True):
        torch.testing.assert_close(after, was, rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_whatever_a_padded_row_has_no_live_one_sees_it(drafting):
    """C14: row 0, page 0 and what is kept for row 0 are nobody's."""
    expected = drafts(drafting, [2, 3, 5]).clone()
    drafting.frozen.kept["hidden"][0] = float("nan")
    drafting.rows.draft_tokens[0] = 77
    for tensor in all_tensors(drafting.driver.cache):
        tensor[0] = float("nan")
    assert torch.equal(drafts(drafting, [2, 3, 5]), expected)


@torch.inference_mode()
def test_what_is_kept_is_of_the_last_token_that_stays(drafting):
    kept = drafting.frozen.kept["hidden"]
    hidden = torch.arange(7 * 48, dtype=torch.float32).view(7, 48)
    rows, q_start = int32(4, 1, 6), int32(0, 3, 3, 7)
    before = kept.clone()
    drafting.frozen.keep(rows, hidden, q_start, torch.tensor([1, 0, 2]))
    assert torch.equal(kept[4], hidden[0])
    assert torch.equal(kept[1], before[1])
    assert torch.equal(kept[6], hidden[4])
    assert torch.equal(kept[[2, 3, 5]], before[[2, 3, 5]])


@torch.inference_mode()
def test_hidden_states_that_are_no_numbers_draft_tokens_of_the_vocabulary(drafting):
    drafting.frozen.kept["hidden"][3] = float("nan")
    drafted = drafts(drafting, [3, 2])
    assert ((drafted >= 0) & (drafted < VOCAB)).all()
    assert drafted[1].tolist() == our_drafts(drafting.model, drafting.assistant, ids_of(2))[:MOST]


PROMPTS = {row: random_ids(3 + 2 * row, seed=row) for row in (1, 2, 4)}
STEPS = 18


class Watched(FrozenDraft):
    """Compares what is drafted with what the assistant drafts of each row alone; then some drafts become right ones, so
    that they are accepted."""

    def watch(self, drafting: tuple[Model, Assistant], said: Said, plain: Said) -> None:
        self._drafting, self._said, self._plain = drafting, said, plain
        self._rng, self.num_right = random.Random(3), 0

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        super().before(plan, inputs)
        for row, q_len in zip(plan.rows.tolist(), plan.q_lens.tolist(), strict=True) if plan.width > 1 else ():
            said, drafts = self._said.tokens[row], self._rows.draft_tokens[row]
            alone = our_drafts(*self._drafting, [*PROMPTS[row], *said])[: q_len - 1]
            assert drafts[: q_len - 1].tolist() == alone, (row, len(said))
            future = self._plain.tokens[row][len(said) : len(said) + self._rng.randint(0, q_len - 1)]
            drafts[: len(future)] = torch.tensor(future)
            self.num_right += len(future)


@pytest.mark.parametrize("captured", [False, True])
def test_c16_drafts_go_on_from_what_was_accepted_and_change_no_token(captured, path, native_ops):
    model = models.load(open_checkpoint(shared_tiny(TARGET).path), ops=native_ops, dtype=torch.float32)
    assistant = load_for(TARGET, path, native_ops)
    graphs = {} if captured else {"graphs": Eager()}
    params = {1: WISHES["greedy"], 2: WISHES["drawn"], 4: WISHES["everything"]}
    options = {"vocab_size": VOCAB, "ops": native_ops}
    plain = plainly(HybridPlanner(hybrid_runner(model, **options), seed=1), PROMPTS, params, STEPS)
    runner = hybrid_runner(model, width=MOST + 1, **options, **graphs)
    forward, backend = Forward(model, native_ops, runner.rows, runner.cache), runner.decode.captured.backend
    runner.proposer = watched = Watched(forward, assistant, sizes=[1, 2, 4], backend=backend)
    plans, rng = HybridPlanner(runner, seed=2), random.Random(4)
    said = begin(plans, PROMPTS, params)
    watched.watch((model, assistant), said, plain)
    while max(map(len, said.tokens.values())) < STEPS - MOST:
        chosen = rng.sample(list(PROMPTS), rng.randint(1, len(PROMPTS)))
        decode(plans, said, [(row, count) if (count := rng.randint(0, MOST)) else row for row in chosen])
    assert watched.num_right > 10
    assert_same(plans, said, plain, PROMPTS)
