"""C16, C17 with the draft heads that checkpoints have: tokens and log-probabilities are those of plain decoding to the
bit, whatever the head drafts and whatever is around a request; and a head that is right is believed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.base.errors import ModelError
from forebay.config.resolve import resolve
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import close
from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Engine, Rig
from tests.integration.test_hybrid_tokens import TIGHT, Known, greedy
from tests.kernels import NATIVE
from tests.models.heads import HEADS, make_headed, make_right
from tests.models.test_mixed_floats import publish
from tests.models.tiny import VOCAB, shared_tiny

RIGHT = (
    *("qwen3_next", "nemotron_h", "bailing_hybrid", "deepseek_v3", "qwen3_5_moe_text", "qwen4_exp_text"),
    "deepseek_v4",
)


def rig_of(path: Path) -> Rig:
    made = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256, draft_head=True)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


def engine_of(rig: Rig, *, width: int, **shape: Any) -> Engine:
    """Its steps are as wide as they may be."""
    engine = rig.engine(width=width, **shape)
    plan = engine.core.scheduler.plan
    engine.core.scheduler.plan = lambda now, *_: plan(now, width)
    return engine


def wanted(number: int) -> SamplingParams:
    """Greedy, drawn, and with penalties, in turn."""
    if number % 3 == 0:
        return greedy(14 + 2 * number)
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5} if number % 3 == 2 else {}
    return SamplingParams(
        max_tokens=14 + 2 * number,
        temperature=0.6,
        top_p=0.9,
        seed=number,
        ignore_eos=True,
        logprobs=1,
        **penalties,
    )


def known_of(rig: Rig) -> Known:
    rng = random.Random(0)
    trunk = [rng.randrange(3, VOCAB) for _ in range(40)]
    own = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    prompts = [trunk[: rng.randrange(41)] + tokens if i % 2 else tokens for i, tokens in enumerate(own)]
    return Known.of(rig, prompts, [wanted(i) for i in range(8)])


@pytest.fixture(scope="module", params=HEADS)
def untrained(request: pytest.FixtureRequest, tmp_path_factory) -> Known:
    """With a random head, which is hardly ever right."""
    return known_of(rig_of(make_headed(request.param, tmp_path_factory.mktemp("headed")).path))


@pytest.fixture(scope="module", params=RIGHT)
def right(request: pytest.FixtureRequest, tmp_path_factory) -> Known:
    """With a head that mostly is."""
    return known_of(rig_of(make_right(request.param, tmp_path_factory.mktemp("right"), wrong=0.05)))


SHAPES = (
    {"width": 2, "page_size": 1, "chunked_prefill_size": 7, "overlap_depth": 1, **TIGHT},
    {"width": 4, "page_size": 16, "overlap_depth": 0, "radix_cache": True, "max_running_requests": 3},
    {"width": 8, "page_size": 4, "chunked_prefill_size": 5, "overlap_depth": 1, "radix_cache": True, **TIGHT},
    {"width": 5, "page_size": 4, "overlap_depth": 2, "retraction_host_bytes": 1 << 30, **TIGHT},
)


@pytest.mark.slow
@pytest.mark.quick(1)
def test_c16_an_untrained_head_changes_no_bit(untrained: Known) -> None:
    untrained.check(engine_of(untrained.rig, width=4, page_size=4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"width-{shape['width']}")
def test_c16_a_head_changes_no_bit_in_any_shape_of_the_engine(right: Known, shape: dict[str, Any]) -> None:
    """Two passes over one engine, so that the second meets what the first left in the cache."""
    engine = engine_of(right.rig, **shape)
    for apart in (0, 2):
        right.check(engine, apart=apart)
    assert engine.count("draft_tokens") > 0
    assert ("num_tokens" not in shape) or engine.count("retractions") > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_c16_tier_brings_the_draft_heads_cache_with_the_prefix(tier: str, tmp_path: Path) -> None:
    """A hit from the tier has the tokens of one on the device, and as many accepted drafts."""
    path = make_right("deepseek_v3", tmp_path / "model", wrong=0.05)
    rig, of_tier = rig_of(path), {"host_tokens": 4096} if tier == "host" else {"disk": (tmp_path / "files", {})}
    engine = engine_of(rig, width=4, page_size=4, radix_cache=True, **of_tier)
    plain = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256).engine(page_size=4)
    widths = [sum(each.core._runner.mover.row_bytes.values()) for each in (engine, plain)]
    assert widths[0] > widths[1], "the head has no columns"
    prompt, accepted, results = [5, 9, 7, 3, 11, 4] * 8, [0.0], []
    for flushed in (False, False, True):
        if flushed:
            engine.core.scheduler.pools.cache.flush()  # of the device alone
        results += engine.run([prompt], greedy(20))
        accepted.append(engine.count("accepted_tokens"))
    assert [result.tiers.get(tier, 0) for result in results] == [0, 0, 44]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert accepted[3] - accepted[2] == accepted[2] - accepted[1] > 0
    close(engine.core)


def run_steps(engine: Engine, tokens: int) -> tuple[list[int], int]:
    before = engine.core.stats.counters["engine.steps"]
    (result,) = engine.run([[5, 9, 7, 3, 11, 4]], greedy(tokens))
    return result.token_ids, engine.core.stats.counters["engine.steps"] - before


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", RIGHT)
def test_a_head_that_is_right_is_accepted_whole(case: str, tmp_path: Path) -> None:
    rig, width = rig_of(make_right(case, tmp_path)), 4
    plain, _ = run_steps(rig.engine(), 41)
    tokens, steps = run_steps(engine_of(rig, width=width), 41)
    assert tokens == plain
    assert steps == 1 + 40 // width


@pytest.mark.quick(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_head_that_is_not_finite_costs_acceptance_alone(value: float, tmp_path: Path) -> None:
    rig = rig_of(make_right("deepseek_v3", tmp_path))
    plain, _ = run_steps(rig.engine(), 20)
    engine = engine_of(rig, width=4)
    engine.core._runner.proposer.head.kept["hidden"].fill_(value)
    before = engine.core._runner.proposer.before

    def poisoned(*step: Any) -> None:
        engine.core._runner.proposer.head.kept["hidden"].fill_(value)
        before(*step)

    engine.core._runner.proposer.before = poisoned
    tokens, steps = run_steps(engine, 20)
    assert tokens == plain
    assert steps > 10


def built(path: Path, **flags: Any) -> Engine:
    """By a server's flags."""
    sizes = {"kv_cache_bytes": "8MiB", "context_length": "256", "max_running_requests": "4", "dtype": "float32"}
    return Engine(build_engine(resolve({"model_path": str(path), **sizes, **flags}).engine)[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", ["qwen3_next", "nemotron_h"])
def test_an_engine_is_built_with_its_draft_head_where_that_is_asked_for(case: str, tmp_path: Path) -> None:
    path = make_right(case, tmp_path)
    plain, _ = run_steps(built(path), 41)
    engine = built(path, speculative_algorithm="NEXTN", speculative_num_draft_tokens="4")
    tokens, steps = run_steps(engine, 41)
    assert tokens == plain
    assert steps < 30
    assert engine.count("accepted_tokens") > 0


@pytest.mark.slow
def test_c16_draft_layer_of_v4_in_published_codes_changes_no_token(tmp_path: Path) -> None:
    path, _ = publish(tmp_path, "fp4")
    plain, _ = run_steps(built(path), 41)
    engine = built(path, speculative_algorithm="NEXTN", speculative_num_draft_tokens="4")
    assert run_steps(engine, 41)[0] == plain
    assert engine.count("draft_tokens") > 0


def test_of_several_draft_heads_the_first_drafts_and_that_is_said(tmp_path: Path, caplog: Any) -> None:
    path = make_right("deepseek_v3", tmp_path)
    stored = load_file(path / "model.safetensors")
    second = {name.replace(".3.", ".4."): 0 * values for name, values in stored.items() if ".layers.3." in name}
    save_file({**stored, **second}, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO", logger="forebay"):
        engine = built(path, speculative_algorithm="NEXTN", speculative_num_draft_tokens="4")
    (line,) = [record.message for record in caplog.records if "draft_heads" in record.message]
    assert "found=2 used=1" in line
    run_steps(engine, 41)
    assert engine.count("accepted_tokens") > 20


def test_a_checkpoint_without_a_draft_head_is_refused_by_name() -> None:
    for case, told in (("qwen3_next", "no draft head"), ("llama", "have no draft head")):
        with pytest.raises(ModelError, match=told):
            built(shared_tiny(case).path, speculative_algorithm="NEXTN")
