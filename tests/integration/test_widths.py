"""C16: real models say the same, to the bit, when some of what they say is guessed, right or wrong, on the host or on
the device, whatever the shape of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forebay.config.engine_config import StateStrategy
from forebay.families import TYPES
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan
from forebay.runtime import ModelRunner
from forebay.runtime.host.packing import Array, Sections
from tests.integration.rig import Engine, Rig
from tests.integration.test_hybrid_tokens import Known
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny

MODELS = ("llama", "falcon_h1", "qwen3_5_text", "glm_moe_dsa", "lfm3", "gpt_oss", "deepseek_v4")
WIDTH = 5
TIGHT = {"num_tokens": 168, "schedule_conservativeness": 0.0}
RESTRICTIONS = {"min_tokens": 12, "stop_token_ids": (60, 61), "bad_words": ((7,), (8, 9), (3, 4, 5))}
EVERYTHING = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": {9: 1.5},
    "logprobs": 1,
    "allowed_token_ids": tuple(range(2, 80)),
    **RESTRICTIONS,
}
SHAPES = (
    {"overlap_depth": 0, "page_size": 4, "chunked_prefill_size": 16},
    {"overlap_depth": 1, "page_size": 1, "chunked_prefill_size": 7, "strategy": StateStrategy.NO_BUFFER, **TIGHT},
    {"overlap_depth": 2, "page_size": 16, "cached_states": 4, "max_running_requests": 3},
    {"overlap_depth": 1, "page_size": 4, "retraction_host_bytes": 1 << 30, **TIGHT},
)


class Guesses:
    """What follows, each token of it right by chance: a proposer of the host, and one of the device."""

    def __init__(self, known: Known, seed: int) -> None:
        self._rng = random.Random(seed)
        self._whole = [prompt + tokens for prompt, (tokens, _) in zip(known.prompts, known.alone, strict=True)]
        self._of_row: dict[int, int] = {}
        self.runner: ModelRunner | None = None

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        return self._guess(req.id, len(req.tokens), self._rng.randint(0, most))

    def ended(self, req: Request) -> None:
        pass

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        return {}

    def capture_next(self) -> bool:
        return False

    def reset_padding(self) -> None:
        pass

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        assert self.runner is not None
        rows = self.runner.rows
        for row, count in zip(plan.rows.tolist(), (plan.q_lens - 1).tolist(), strict=True) if plan.width > 1 else ():
            guess = self._guess(self._of_row[row], int(rows.kv_lens[row]) + 1, count)
            rows.draft_tokens[row, :count] = torch.tensor(guess, dtype=torch.int64)

    def after(self, plan: StepPlan, inputs: Sections, input_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        self._of_row |= {admission.row: admission.request_id for admission in plan.admissions}

    def _guess(self, request_id: int, length: int, count: int) -> list[int]:
        """Request ids count from 1, and on and on in one engine."""
        whole = self._whole[(request_id - 1) % len(self._whole)]
        guess = [*whole[length : length + count], *[0] * count][:count]
        return [token if self._rng.random() < 0.8 else self._rng.randrange(VOCAB) for token in guess]


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    return known_of(request.param)


def known_of(model_type: str, shortest: int = 20) -> Known:
    rig = Rig(shared_tiny(model_type).path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    rng = random.Random(1)
    trunk = [rng.randrange(3, VOCAB) for _ in range(50)]
    prompts = [trunk[: rng.randrange(50)] + [rng.randrange(3, VOCAB) for _ in range(1 + 5 * i)] for i in range(6)]
    wishes = ({"temperature": 0.0, "logprobs": 2}, {"temperature": 1.1, "top_p": 0.9, **EVERYTHING})
    params = [
        SamplingParams(max_tokens=shortest + i, ignore_eos=True, seed=i, **wishes[i % 2]) for i in range(len(prompts))
    ]
    return Known.of(rig, prompts, params)


def engine_of(known: Known, guesses: Guesses, *, on_host: bool, **shape: Any) -> Engine:
    engine = known.rig.engine(
        radix_cache=True, width=WIDTH, proposer=guesses if on_host else None, **{"cached_states": 12, **shape}
    )
    scheduler, rng = engine.core.scheduler, random.Random(7)
    plan = scheduler.plan
    scheduler.plan = lambda now, width=1, *_: plan(now, rng.choice((1, 3, WIDTH)))
    if not on_host:
        runner = engine.core._runner
        guesses.runner = runner if isinstance(runner, ModelRunner) else runner._runner
        guesses.runner.proposer = guesses
    return engine


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("shape", "on_host"),
    [(SHAPES[0], True), *((shape, False) for shape in SHAPES)],
    ids=["host", "device", "no-buffer", "few-rows", "kept"],
)
def test_c16_guesses_change_no_bit_of_what_is_said(known: Known, shape: dict[str, Any], on_host: bool) -> None:
    """Twice over one engine: the second time what was guessed, accepted and cached is what prompts resume from."""
    engine = engine_of(known, Guesses(known, seed=3), on_host=on_host, **shape)
    for apart in (0, 2):
        known.check(engine, apart=apart)
    assert engine.count("accepted_tokens") > 0
    if "num_tokens" in shape:
        assert engine.count("retractions") > 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("model_type", [model_type for model_type in TYPES if model_type not in MODELS])
def test_c16_guesses_of_the_host_change_no_bit_of_any_model_type(model_type: str) -> None:
    known = known_of(model_type)
    engine = engine_of(known, Guesses(known, seed=5), on_host=True, **SHAPES[0])
    known.check(engine, apart=1)
    assert engine.count("accepted_tokens") > 0
