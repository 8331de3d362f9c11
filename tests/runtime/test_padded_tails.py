"""C13, C15: tails of static buffers. What an earlier, larger step left there reaches no later one.

Engines of the field cleared the tail only if rows were padded, and not if tokens alone were; or filled the head of a
buffer whose whole a kernel reads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.ops import Ops
from forebay.ops.native.ops import NativeOps
from forebay.pools.regions import Regions
from forebay.pools.table import Table
from forebay.requests.step_plan import StepResult
from forebay.runtime.graphs.backends import CpuGraphs, CudaGraphs, Eager
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.steps.ragged import RaggedInputs
from tests.models.tiny import VOCAB, make_oracle, random_ids, shared_tiny
from tests.ops.triton_device import ALL_ROWS, INTERPRETER_ALONE, Choice, Choices, TritonOps, attention
from tests.runtime.elementwise import SameEverywhere
from tests.runtime.fake_cuda import FakeCudaGraphs
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS
from tests.runtime.graph_steps import poison

CASES = ("llama", "gpt_oss", "deepseek_v4-short-blocks", "falcon_h1", "lfm3", "kimi_linear")
WIDTH, SIZES = 4, (4, 8, 16, 24)  # captured numbers of tokens: most steps pad some


def runners(plans: HybridPlanner) -> Iterator[GraphRunner]:
    shapes = plans.runner.shapes.values()
    return (shape.captured for shape in shapes if shape.captured is not None)


def poison_all(plans: HybridPlanner) -> None:
    """Nonsense in each static input of each kind of step, its tails included."""
    for runner in runners(plans):
        inputs = runner._inputs
        for table in (
            (inputs._tokens, inputs._sequences, *inputs._others) if isinstance(inputs, RaggedInputs) else (inputs,)
        ):
            assert isinstance(table, Table)
            poison(table)


def steps(plans: HybridPlanner, seed: int, rounds: int, *, poisoned: bool) -> list[StepResult]:
    """Prompts, then decodes of a batch whose rows and tokens grow and shrink apart: the same rows have other numbers of
    drafts in the next step, so tokens are padded and rows are not."""
    rng, rows = random.Random(seed), list(range(1, NUM_ROWS + 1))
    results: list[StepResult] = []

    def step(extends: list[tuple[int, int]], decodes: list[int | tuple[int, list[int]]]) -> None:
        if poisoned:
            poison_all(plans)
        results.append(plans.step(extends, decodes))

    for row in rows:
        plans.begin(row, random_ids(3 + row, seed=row))
    step([(row, 3 + row) for row in rows[:3]], [])
    step([(row, 2) for row in rows[3:]], [*rows[:3]])
    step([(row, 1 + row) for row in rows[3:]], [*rows[:3]])
    for i in range(rounds):
        chosen = rows if i % 2 == 0 else rng.sample(rows, rng.randint(1, len(rows)))
        drafts = [random_ids(rng.randint(0, WIDTH - 1), seed=rng.randrange(99)) for _ in chosen]
        step([], [(row, own) if own else row for row, own in zip(chosen, drafts, strict=True)])
    return results


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
def test_replays_behind_poisoned_buffers_give_the_bits_of_steps_of_exact_size(case: str, native_ops: NativeOps) -> None:
    graphs = CpuGraphs(native_ops, Regions())
    assert_same_replays(shared_tiny(case).path, native_ops, graphs, SIZES, seeds=(0, 1), rounds=5)


@pytest.mark.slow
@INTERPRETER_ALONE
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN in rows that nobody reads
@pytest.mark.parametrize(("case", "num_layers"), [("llama", 1), ("gpt_oss", 2), ("falcon_h1", 1)])
def test_triton_s_replays_behind_poisoned_buffers_give_the_bits_of_steps_of_exact_size(
    case: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_PROGRAMS", 8)
    monkeypatch.setattr(FakeCudaGraphs, "_WARM_UPS", 0)
    ops = TritonOps("cpu", 1, Choices(lambda weight: Choice(ALL_ROWS, "tried")))
    make_oracle(case, num_hidden_layers=num_layers).save_pretrained(tmp_path)
    with SameEverywhere():
        assert_same_replays(tmp_path, ops, FakeCudaGraphs(), (12, 24), seeds=(0,), rounds=2)


def assert_same_replays(
    path: Path, ops: Ops, graphs: CpuGraphs | CudaGraphs, sizes: tuple[int, ...], *, seeds: tuple[int, ...], rounds: int
) -> None:
    model = models.load(open_checkpoint(path), ops=ops, dtype=torch.float32)

    def planner(backend: CpuGraphs | CudaGraphs | Eager, sizes: list[int]) -> HybridPlanner:
        runner = hybrid_runner(model, vocab_size=VOCAB, ops=ops, graphs=backend, graph_sizes=sizes, width=WIDTH)
        for shape in (runner.verify, runner.extend):
            if shape is not None and shape.captured is not None:
                shape.captured.sizes = sizes
        return HybridPlanner(runner)

    most = NUM_ROWS * WIDTH
    exact = planner(Eager(), list(range(1, most + 1)))
    graphed = planner(graphs, [size for size in sizes if size <= most])
    while not graphs.captures_quickly and graphed.runner.capture_next():
        pass
    for seed in seeds:
        got = [(r.token_ids, r.logprobs) for r in steps(graphed, seed, rounds, poisoned=True)]
        assert got == [(r.token_ids, r.logprobs) for r in steps(exact, seed, rounds, poisoned=False)]
        for plans in (exact, graphed):
            for row in range(1, NUM_ROWS + 1):
                plans.leave(row)
    replayed = graphed.runner.verify if graphs.captures_quickly else graphed.runner.extend
    assert replayed is not None
    assert replayed.captured is not None
    assert replayed.captured.graphs, "no step was replayed"


@pytest.mark.parametrize("kind", ["verify", "extend"])
def test_padded_columns_say_the_same_as_a_recomputation_from_them(kind: str, native_ops: NativeOps) -> None:
    """Every number that is derived from a step is one of its padded columns; each token belongs to one sequence."""
    model = models.load(open_checkpoint(shared_tiny("falcon_h1").path), ops=native_ops, dtype=torch.float32)
    runner = hybrid_runner(
        model, vocab_size=VOCAB, ops=native_ops, graphs=CpuGraphs(native_ops, Regions()), width=WIDTH
    )
    graphs = getattr(runner, kind).captured
    inputs, rng = graphs._inputs, random.Random(9)
    sequences = inputs._sequences
    for _ in range(50):
        lens = [rng.randint(1, WIDTH) for _ in range(rng.randint(1, NUM_ROWS))]
        ends, size = torch.tensor(lens).cumsum(0), sum(lens) + rng.randint(0, 5)
        for table in (inputs._tokens, sequences, *inputs._others):
            poison(table)
        values = {"req_pool_indices": torch.arange(len(lens)) + 1, "q_ends": ends}
        inputs.fill(values, sum(lens), size)
        padded = inputs.head(size)
        q_start = sequences.q_start.tolist()
        assert q_start[0] == 0
        assert q_start == sorted(q_start)
        counts = [stop - start for start, stop in itertools.pairwise(q_start)]
        assert counts == [*lens, size - sum(lens), *[0] * (len(counts) - len(lens) - 1)]
        assert sum(counts) == size == padded.num_rows
        assert padded["req_pool_indices"].tolist() == [*range(1, len(lens) + 1), *[PAD] * (len(counts) - len(lens))]
