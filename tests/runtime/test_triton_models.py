"""Whole models on the GPU's kernels, through the runner, give what the reference gives; and graphs what their Python
does. Without a GPU a few types run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.ops import Ops
from forebay.requests.step_plan import StepResult
from forebay.runtime.graphs.backends import CudaGraphs, Eager
from tests.models.tiny import CASES, VOCAB, page_size_of, random_ids, shared_tiny
from tests.ops.test_triton_launch import refuse
from tests.ops.triton_device import HAS_GPU, INTERPRETER_ALONE, TritonOps, attention
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import PAGE_SIZE

# Attention with sinks and windows, latent and compressed attention, experts, a scan and a delta rule.
INTERPRETED = ("gpt_oss", "kimi_linear", "falcon_h1", "deepseek_v4-short-blocks")
FITTING = [case for case in CASES if page_size_of(case, PAGE_SIZE) == PAGE_SIZE]
RUNS = [
    *(pytest.param("cpu", case, marks=[pytest.mark.slow, INTERPRETER_ALONE]) for case in INTERPRETED),
    *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in FITTING),
]
RUNS_IN_CODES = [run for run in RUNS if run.values[0] == "cuda" or run.values[1] in ("gpt_oss", "kimi_linear")]
SIZES = [1, 2, 4]


@pytest.fixture(scope="module")
def paths() -> Callable[[str], Path]:
    return lambda case: shared_tiny(case).path


@pytest.fixture(autouse=True)
def _few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that runs one program at a time."""
    if not HAS_GPU:
        monkeypatch.setattr(attention, "_PROGRAMS", 8)


def planner(
    path: Path,
    ops: Ops,
    device: str,
    dtype: torch.dtype,
    backend: CudaGraphs | Eager,
    kv_dtype: torch.dtype | None = None,
) -> HybridPlanner:
    with torch.inference_mode():
        model = models.load(open_checkpoint(path), ops=ops, dtype=dtype, device=device)
    runner = hybrid_runner(
        model,
        vocab_size=VOCAB,
        dtype=dtype,
        kv_dtype=kv_dtype,
        ops=ops,
        device=device,
        graphs=backend,
        graph_sizes=SIZES,
    )
    return HybridPlanner(runner)


def sampled(plans: HybridPlanner, *, decodes: int) -> list[StepResult]:
    """Prompts in chunks, one beside a decode, then decodes of a batch that shrinks."""
    for row in (1, 2, 3):
        plans.begin(row, random_ids(4 + row, seed=row))
    results = [plans.step(extends=[(1, 5), (2, 4)]), plans.step(extends=[(2, 2), (3, 7)], decodes=[1])]
    return [*results, *(plans.step(decodes=[3, 1, 2][: 3 - step % 3]) for step in range(decodes))]


def assert_close(got: list[StepResult], expected: list[StepResult]) -> None:
    """The same tokens, and log-probabilities that differ by roundings."""
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.failed == theirs.failed == ()
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=2e-4)


@pytest.mark.parametrize(("device", "case"), RUNS)
def test_a_model_gives_what_the_reference_gives(device: str, case: str, paths: Callable[[str], Path]) -> None:
    decodes = 1 if device == "cpu" else 9
    expected = sampled(planner(paths(case), Ops(1), "cpu", torch.float32, Eager()), decodes=decodes)
    ops = TritonOps(device, 1)
    assert_close(sampled(planner(paths(case), ops, device, torch.float32, Eager()), decodes=decodes), expected)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8], ids=["int8", "fp8"])
@pytest.mark.parametrize(("device", "case"), RUNS_IN_CODES)
def test_a_model_with_kv_in_codes_gives_what_the_reference_gives(
    device: str, case: str, kv_dtype: torch.dtype, paths: Callable[[str], Path]
) -> None:
    decodes = 1 if device == "cpu" else 9
    expected = sampled(planner(paths(case), Ops(1), "cpu", torch.float32, Eager(), kv_dtype), decodes=decodes)
    made = planner(paths(case), TritonOps(device, 1), device, torch.float32, Eager(), kv_dtype)
    assert_close(sampled(made, decodes=decodes), expected)


@INTERPRETER_ALONE
@pytest.mark.quick(1)
@pytest.mark.parametrize("case", INTERPRETED)
def test_a_model_no_kernel_of_which_compiles_gives_what_the_reference_gives(
    case: str, paths: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    ops = TritonOps("cpu", 1)
    expected = sampled(planner(paths(case), Ops(1), "cpu", torch.float32, Eager()), decodes=3)
    assert_close(sampled(planner(paths(case), ops, "cpu", torch.float32, Eager()), decodes=3), expected)
    assert {"attention.paged_attention", "attention.store_kv", "steps.place_tokens"} <= ops.fallbacks.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", FITTING)
def test_graphs_give_the_bits_of_the_python_they_were_captured_from(
    case: str, dtype: torch.dtype, paths: Callable[[str], Path]
) -> None:
    ops = TritonOps("cuda", 1)
    graphed = planner(paths(case), ops, "cuda", dtype, CudaGraphs("cuda"))
    while graphed.runner.capture_next():
        pass
    assert len(graphed.runner.decode.captured.graphs) == len(SIZES)
    bare = planner(paths(case), ops, "cuda", dtype, Eager())
    assert sampled(graphed, decodes=12) == sampled(bare, decodes=12)
