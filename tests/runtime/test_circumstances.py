"""C28: no bit of an answer depends on what is around its request, on each backend that promises it.

A runner is asked what `forebay verify` asks an engine: chunks beside other requests, decodes beside prompts, the prefix
cache, a copy in host memory, drafts, other adapters. Kernels for GPUs run in Triton's interpreter without a GPU.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.memory.slots import PAD
from forebay.models import Model
from forebay.ops import Ops
from forebay.requests.step_plan import StepResult
from tests.kernels import NATIVE
from tests.models.adapters import SLOTS
from tests.models.test_adapters import FIRST, SECOND, adapter_of, put
from tests.models.tiny import VOCAB, make_oracle, random_ids, shared_tiny
from tests.ops.triton_device import ALL_ROWS, HAS_GPU, INTERPRETER_ALONE, Choice, Choices, TritonOps, attention
from tests.pools.caches import all_tensors
from tests.runtime.conftest import made
from tests.runtime.elementwise import SameEverywhere
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS
from tests.runtime.plans import Decode

TOKENS: Final = random_ids(21, seed=1)  # past the ends of pages and of a scan's chunk of 16
OTHERS: Final = random_ids(20, seed=2)
OTHER, OWN, RESUMED, BACK = 1, 2, 4, 5  # rows
SHARED = 12  # tokens, whole pages
NUM_NEW, WIDTH = 4, 4
IN_INT4, WITH_ADAPTERS = "llama in int4", "llama with adapters"
# Rings of compressed attention go neither to the host nor to another row by the plans of these tests.
CASES = (
    *("llama", "qwen3", "gpt_oss", "falcon_h1", "qwen3_next", "kimi_linear", "deepseek_v3", "gemma4_text"),
    *("deepseek_v4-short-blocks", "glm5_next_text", "jamba", "glm_moe_dsa", "lfm3", IN_INT4, WITH_ADAPTERS),
)
# Tables of n-grams are read on a CPU alone.
ON_A_CPU = (*CASES, "qwen4_exp_text-ngrams")
_SLOW = ("glm5_next_text", "qwen4_exp_text-ngrams")
RUNS = [
    *(pytest.param(NATIVE, case, marks=[pytest.mark.slow][: case in _SLOW]) for case in ON_A_CPU),
    *(pytest.param("cpu", case, marks=[INTERPRETER_ALONE, *[pytest.mark.slow][: case != IN_INT4]]) for case in CASES),
    *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES),
]
ADAPTERS = {OTHER: 2, OWN: 1, RESUMED: 1, BACK: 1}  # the slot of a row's adapter

Answer = list[tuple[int, object]]
"""Of each token its id, and its log-probability with those of the likeliest."""


@pytest.fixture(autouse=True)
def _few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that runs one program at a time."""
    if not HAS_GPU:
        monkeypatch.setattr(attention, "_PROGRAMS", 8)


@functools.cache
def ops_of(device: str) -> Ops:
    """On Triton products of dense layers are Forebay's own, too: those of the library are compared at a start."""
    return made(NATIVE) if device == NATIVE else TritonOps(device, 1, Choices(lambda weight: Choice(ALL_ROWS, "tried")))


def load(case: str, ops: Ops, device: str, folder: Path) -> Model:
    options: dict[str, Any] = {"ops": ops, "dtype": torch.float32, "device": device}
    if case == IN_INT4:
        make_oracle("llama", hidden_size=64, head_dim=16, intermediate_size=96, num_hidden_layers=1).save_pretrained(
            folder
        )
        return models.load(open_checkpoint(folder), quantization=Quantization.INT4, **options)
    if case == WITH_ADAPTERS:
        model = models.load(open_checkpoint(shared_tiny("llama").path), adapters=SLOTS, **options)
        for slot, adapter in ((1, FIRST), (2, SECOND)):
            put(model, slot, adapter_of("llama", adapter))
        return model
    return models.load(open_checkpoint(shared_tiny(case).path), **options)


def said(*steps: tuple[StepResult, int]) -> Answer:
    """The tokens of a request, of which each step's result has one at the place given."""
    assert not any(result.failed for result, _ in steps)
    return [(result.token_ids[at], result.logprobs and result.logprobs[at]) for result, at in steps]


def alone(plans: HybridPlanner) -> Answer:
    plans.begin(OWN, TOKENS)
    steps = [plans.step([(OWN, len(TOKENS))]), *(plans.step(decodes=[OWN]) for _ in range(NUM_NEW - 1))]
    return said(*((step, 0) for step in steps))


def beside_others(plans: HybridPlanner, *, copied: bool) -> list[Answer]:
    """In chunks, beside another prompt and then its decodes, NaN wherever nobody has anything. If `copied`, a second
    request begins with the first one's pages and a state of its own chunk, and the first goes to the host meanwhile."""
    if copied:
        plans.poison([])
    poison_padding(plans)
    plans.begin(OTHER, OTHERS)
    plans.begin(OWN, TOKENS)
    plans.step([(OTHER, 7), (OWN, 5)])
    plans.step([(OTHER, 13), (OWN, SHARED - 5)], snapshots=[(OWN, SHARED, NUM_ROWS + 2)] if copied else ())
    rest = len(TOKENS) - SHARED
    if not copied:
        first = plans.step([(OWN, rest)], [OTHER])
        more = [plans.step(decodes=[OTHER, OWN] if i % 2 else [OWN]) for i in range(NUM_NEW - 1)]
        return [said((first, 0), *((step, i % 2) for i, step in enumerate(more)))]
    plans.begin_from(RESUMED, TOKENS, OWN, SHARED, NUM_ROWS + 2)
    first = plans.step([(OWN, rest), (RESUMED, rest)], [OTHER])
    second = plans.step(decodes=[OTHER, OWN])
    own = [(first, 0), (second, 1)]
    plans.save(OWN)
    third = plans.step(decodes=[RESUMED])
    poison_padding(plans)
    plans.load(BACK, OWN, TOKENS + [token for token, _ in said(*own)])
    fourth = plans.step([(BACK, 1)], [RESUMED, OTHER])
    fifth = plans.step(decodes=[RESUMED, BACK])
    return [said(*own, (fourth, 0), (fifth, 1)), said((first, 1), (third, 0), (fourth, 1), (fifth, 0))]


def poison_padding(plans: HybridPlanner) -> None:
    """C14: padded rows leave there what no live one reads."""
    for tensor in all_tensors(plans.runner.cache):
        if tensor.numel():
            tensor[PAD].view(torch.uint8).fill_(0xFF)


def with_drafts(plans: HybridPlanner, expected: Answer) -> Answer:
    """Two drafts are accepted, a third is not, and another row has none."""
    plans.begin(OTHER, OTHERS[:5])
    plans.begin(OWN, TOKENS)
    answer = said((plans.step([(OTHER, 5), (OWN, len(TOKENS))]), 1))
    right = [token for token, _ in expected]
    decodes: list[Decode] = [OTHER, (OWN, [*right[1:3], (right[3] + 1) % VOCAB])]
    result = plans.step(decodes=decodes)
    assert result.num_new == [1, 3]
    return answer + said(*((result, at) for at in (1, 2, 3)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN in rows that nobody reads
@pytest.mark.filterwarnings("ignore:overflow encountered")  # and of sums that end up in no answer
@pytest.mark.parametrize(("backend", "case"), RUNS)
@torch.inference_mode()
def test_c28_an_answer_has_the_bits_that_its_request_gets_alone(backend: str, case: str, tmp_path: Path) -> None:
    with SameEverywhere() if backend == "cpu" else nullcontext():
        check(backend, case, tmp_path)


def check(backend: str, case: str, tmp_path: Path) -> None:
    ops, device = ops_of(backend), "cuda" if backend == "cuda" else "cpu"
    model = load(case, ops, device, tmp_path)

    def planner(width: int = 1) -> HybridPlanner:
        plans = HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, ops=ops, device=device, width=width))
        plans.adapters = ADAPTERS if case == WITH_ADAPTERS else {}
        return plans

    expected = alone(planner())
    for answer in beside_others(planner(), copied=not case.startswith(("deepseek_v4", "glm5_next", "qwen4_exp"))):
        assert answer == expected
    assert with_drafts(planner(WIDTH), expected) == expected
