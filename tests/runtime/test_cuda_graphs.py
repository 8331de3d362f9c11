"""Steps with prompts in CUDA graphs, whose capture is faked: see `fake_cuda`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.ops.native.ops import NativeOps
from forebay.runtime.graphs.backends import CudaGraphs, Eager
from forebay.runtime.steps import extend
from forebay.runtime.steps.extend import token_counts
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.ops.triton_device import INTERPRETER_ALONE, TritonOps, attention
from tests.runtime.fake_cuda import FakeCudaGraphs
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner

CASES = ["llama", "gpt_oss", "falcon_h1", "qwen3_next", "kimi_linear", "deepseek_v4-short-blocks"]


class Values(NamedTuple):
    values: torch.Tensor


def planner(case: str, ops: Any, backend: CudaGraphs | Eager, **sizes: Any) -> HybridPlanner:
    with torch.inference_mode():
        model = models.load(open_checkpoint(shared_tiny(case).path), ops=ops, dtype=torch.float32)
    return HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, ops=ops, graphs=backend, graph_sizes=[4], **sizes))


def sampled(plans: HybridPlanner, rounds: int) -> list[object]:
    """Prompts of several lengths, alone and beside decodes: steps of numbers of tokens between captured ones."""
    results = []
    for turn in range(rounds):
        for row in (1, 2, 3):
            plans.begin(row, random_ids(18 + row, seed=row))
        results += [
            plans.step(extends=[(1, 19), (2, 10 - turn)]),
            plans.step(extends=[(2, 10 + turn), (3, 6)], decodes=[1]),
            plans.step(extends=[(3, 15)], decodes=[2, 1]),
            plans.step(decodes=[3, 1]),
        ]
        for row in (1, 2, 3):
            plans.leave(row)
    return [(result.token_ids, result.logprobs, result.failed) for result in results]


def captured(plans: HybridPlanner) -> list[int]:
    runner = plans.runner.extend.captured
    assert runner is not None
    while plans.runner.capture_next():
        pass
    return sorted(runner.graphs)


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES)
def test_c15_steps_with_prompts_in_cuda_graphs_give_the_bits_of_their_python(native_ops: NativeOps, case: str) -> None:
    graphed = planner(case, native_ops, FakeCudaGraphs())
    assert captured(graphed) == [16, 20, 24, 28, 32]
    assert sampled(graphed, 3) == sampled(planner(case, native_ops, Eager()), 3)


def test_c15_prompts_of_a_draft_model_in_cuda_graphs_give_the_bits_of_their_python(native_ops: NativeOps) -> None:
    def drafted(backend: CudaGraphs | Eager) -> HybridPlanner:
        checkpoint = open_checkpoint(shared_tiny("llama").path)
        with torch.inference_mode():
            model = models.load(checkpoint, ops=native_ops, dtype=torch.float32)
            first = len(model.cache_specs())
            draft = models.load(checkpoint, ops=native_ops, dtype=torch.float32, first_entry=first)
        options: dict[str, Any] = {"graphs": backend, "graph_sizes": [4], "width": 3, "draft_model": draft}
        return HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, ops=native_ops, **options))

    graphed = drafted(FakeCudaGraphs())
    captured(graphed)
    assert max(graphed.runner.proposer.prompts.graphs) > 16, "prompts of the draft model are captured"
    assert sampled(graphed, 1) == sampled(drafted(Eager()), 1)


def test_c15_a_step_of_more_tokens_than_any_graph_has_runs_by_its_python(
    native_ops: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extend, "_GPU_UP_TO", 20)
    graphed = planner("llama", native_ops, FakeCudaGraphs())
    assert captured(graphed) == [16, 20]
    assert sampled(graphed, 2) == sampled(planner("llama", native_ops, Eager()), 2)


def test_c15_fake_capture_takes_an_index_by_places_and_none_by_a_mask() -> None:
    values, graphs = torch.arange(4.0), FakeCudaGraphs()
    (found,) = graphs.capture(lambda: Values(values[torch.arange(4) // 2 * 2]))()
    assert found.tolist() == [0.0, 0.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="reads a value on the host"):
        graphs.capture(lambda: Values(values[values > 1.0]))


@pytest.mark.slow
@INTERPRETER_ALONE
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN in rows that nobody reads
@pytest.mark.parametrize("case", ["llama", "gpt_oss", "falcon_h1"])
def test_c15_triton_s_steps_with_prompts_launch_what_was_captured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PROGRAMS", 8)
    monkeypatch.setattr(extend, "token_counts", lambda most, *, quickly: [24, 32])
    graphed = planner(case, TritonOps("cpu", 1), FakeCudaGraphs())
    assert captured(graphed) == [24, 32]
    assert sampled(graphed, 1) == sampled(planner(case, TritonOps("cpu", 1), Eager()), 1)


@pytest.mark.parametrize("most", [1, 5, 16, 17, 100, 2048, 8448])
def test_token_counts_of_a_gpu_are_few_and_a_fifth_of_a_step_is_padding_at_most(most: int) -> None:
    counts = token_counts(most, quickly=False)
    assert counts[-1] == min(most, 2048)
    assert len(counts) <= 29
    assert all(5 * (larger - (smaller + 1)) <= larger for smaller, larger in pairwise(counts))
