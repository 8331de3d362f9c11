"""C5, C13, C14: NaN, and scales of 0xFF, in row, page, window, slot and ring 0 change nothing, on every backend.

Padded rows write there, and an engine of the field read it back behind a mask: 0 times NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.ops import Ops
from forebay.ops.native.ops import NativeOps
from forebay.pools.regions import Regions
from forebay.requests.step_plan import StepResult
from forebay.runtime.graphs.backends import CpuGraphs, Eager
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.ops.triton_device import INTERPRETER_ALONE, TritonOps, attention
from tests.pools.caches import all_tensors
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner

# One type for each set of columns that types declare, as in `tests/transfer/test_every_column.py`.
TYPES = (
    *("llama", "gpt_oss", "starcoder2", "deepseek_v3", "deepseek_v4-short-blocks", "lfm2", "lfm3"),
    *("falcon_h1", "jamba", "mamba", "mamba2", "kimi_linear"),
)
INTERPRETED = ("kimi_linear", "falcon_h1", "gpt_oss", "deepseek_v4-short-blocks")
PADDED_TO = 4
EIGHT_BITS = ("llama", "gpt_oss", "deepseek_v3", "kimi_linear")


def poison(plans: HybridPlanner) -> None:
    """Every byte 0xFF: NaN of each float type, -1 of 8-bit codes, and a NaN for their scales."""
    for tensor in all_tensors(plans.runner.cache):
        if tensor.numel():
            tensor[PAD].view(torch.uint8).fill_(0xFF)


def run(plans: HybridPlanner, *, poisoned: bool, num_decodes: int) -> list[StepResult]:
    """Prompts in chunks, one beside a decode, then decodes of two rows and of one, padded to `PADDED_TO`."""
    steps: list[tuple[list[tuple[int, int]], list[int]]] = [([(1, 5), (2, 4)], []), ([(2, 2)], [1])]
    steps += [([], [2, 1] if i % 2 else [2]) for i in range(num_decodes)]
    for row, length in ((1, 5), (2, 6)):
        plans.begin(row, random_ids(length, seed=row))
    results: list[StepResult] = []
    for extends, decodes in steps:
        if poisoned:
            poison(plans)
        results.append(plans.step(extends, decodes))
    return results


def check(case: str, ops: Ops, *, kv_dtype: torch.dtype = torch.float32, num_decodes: int = 6, **graphs: Any) -> None:
    def made() -> HybridPlanner:
        with torch.inference_mode():
            model = models.load(open_checkpoint(shared_tiny(case).path), ops=ops, dtype=torch.float32)
        runner = hybrid_runner(model, vocab_size=VOCAB, ops=ops, kv_dtype=kv_dtype, graph_sizes=[PADDED_TO], **graphs)
        return HybridPlanner(runner)

    clean = run(made(), poisoned=False, num_decodes=num_decodes)
    dirty = run(made(), poisoned=True, num_decodes=num_decodes)
    assert not any(step.failed for step in dirty)
    assert [step.token_ids for step in clean] == [step.token_ids for step in dirty]
    if isinstance(ops, NativeOps):
        assert [step.logprobs for step in clean] == [step.logprobs for step in dirty]
        return
    # A padded row takes other experts, and how many rows an expert has decides how torch multiplies them.
    for one, other in zip(clean, dirty, strict=True):
        for here, there in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert here is not None
            assert there is not None
            assert here.top_logprobs == pytest.approx(there.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("case", TYPES)
def test_poisoned_padding_native_graphs_change_nothing(case: str, native_ops: Any) -> None:
    check(case, native_ops, graphs=CpuGraphs(native_ops, Regions()))


@pytest.mark.parametrize("case", TYPES)
def test_poisoned_padding_reference_changes_nothing(case: str) -> None:
    check(case, Ops(1), graphs=Eager(), num_decodes=2)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", EIGHT_BITS)
def test_poisoned_scales_change_nothing(case: str, native_ops: Any) -> None:
    check(case, native_ops, kv_dtype=torch.int8, graphs=CpuGraphs(native_ops, Regions()))
    check(case, Ops(1), kv_dtype=torch.int8, graphs=Eager(), num_decodes=2)


@pytest.mark.slow
@INTERPRETER_ALONE
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN in rows that nobody reads
@pytest.mark.parametrize("case", INTERPRETED)
def test_poisoned_padding_triton_changes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PROGRAMS", 8)  # for a machine that runs one program at a time
    check(case, TritonOps("cpu", 1), graphs=Eager(), num_decodes=1)
