"""Plans of an engine, carried out by ranks that have a share of the model each: the results are those of one rank, to
the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.config.engine_config import CacheTypes
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle.tiers import EngineTiers
from forebay.engine.loop import build
from forebay.formats.quantization import Quantization
from forebay.memory.budget import PoolSizes
from forebay.models import Model
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange, LostRank
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Launched, StepPlan, StepResult
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager
from tests.kernels import NATIVE, VARIANTS
from tests.models.ranks import model_of, on_ranks, ops_of_ranks
from tests.models.tiny import page_size_of, random_ids, shared_tiny

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU")

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(
    max_tokens=9, temperature=1.1, top_k=40, repetition_penalty=1.2, seed=7, ignore_eos=True, logprobs=2
)
SHARED = random_ids(20, seed=1)
PROMPTS = [*(SHARED[:17] + random_ids(length, seed=length) for length in (1, 6, 12))]
# Of one dimension each: the page size, chunks, how steps run, and where retracted requests are.
SETTINGS: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "page 16, chunks": {"page_size": 16, "chunked_prefill_size": 16},
    "eager": {"disable_cuda_graph": True, "page_size": 4},
    "retracted to the host": {
        "page_size": 4,
        "retraction_host_bytes": "1MiB",
        "max_total_tokens": 56,
        "schedule_conservativeness": 0.0,
    },
}


class Recorder:
    """A runner that keeps the plans and the results of another."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.done: list[tuple[StepPlan, Launched]] = []

    def launch(self, plan: StepPlan) -> Launched:
        launched = self._runner.launch(plan)
        self.done.append((plan, launched))
        return launched


@dataclass(frozen=True)
class Recorded:
    """The plans of an engine and their results, how its runner was made, and its counters."""

    plans: list[tuple[StepPlan, StepResult]]
    made: Mapping[str, Any]
    config: Any
    counters: Mapping[str, int]


def recorded(case: str, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Recorded:
    """Run requests, each twice, on an engine of one rank."""
    made: dict[str, Any] = {}

    def keep(model: Any, **options: Any) -> ModelRunner:
        made.update(options)
        return build_runner(model, **options)

    monkeypatch.setattr(build, "build_runner", keep)
    asked = {"model": str(shared_tiny(case).path), "dtype": "float32", "kernels": NATIVE, "context_length": 40}
    asked |= {"kv_cache_bytes": "1MiB", "max_running_requests": 4, "overlap_depth": 0, "num_threads": 1}
    asked |= {"chunked_prefill_size": 7, **flags}
    config = resolve(asked | {"page_size": page_size_of(case, flags.get("page_size", 4))}).engine
    core, _ = build.build_engine(config)
    recorder = core._runner = Recorder(core._runner)
    for request_id in range(2 * len(PROMPTS)):
        params = GREEDY if request_id % 3 else DRAWN
        prompt = PROMPTS[request_id % len(PROMPTS)]
        core.add(AddRequest(request_id=request_id + 1, prompt_token_ids=prompt, params=params))
    while not core.idle:
        core.step()
    plans = [(plan, launched.result()) for plan, launched in recorder.done]
    return Recorded(plans, made, config, core.scheduler.state(0.0).counters)


def repeat(run: Recorded, model: Model, ops: Ops, exchange: Exchange) -> list[StepResult]:
    """Carry the plans out on a rank."""
    own = {name: run.made[name] for name in ("sizes", "max_num_tokens", "vocab_size", "types", "graph_sizes", "width")}
    tiers = EngineTiers(run.config, run.made["sizes"], ops, "")
    graphs = Eager() if run.config.disable_cuda_graph else None
    runner = build_runner(model, ops=ops, device="cpu", exchange=exchange, make_tiers=tiers.make, graphs=graphs, **own)
    runner.warm_up()
    return [runner.launch(plan).result() for plan, _ in run.plans]


def check(case: str, monkeypatch: pytest.MonkeyPatch, *, size: int = 2, **flags: Any) -> Recorded:
    """The results of rank 0 are those of one rank, log-probabilities to the bit."""
    run = recorded(case, monkeypatch, **flags)
    quantization = Quantization(flags.get("quantization", "none"))
    results = on_ranks(shared_tiny(case).path, lambda *of: repeat(run, *of), size=size, quantization=quantization)
    for step, (found, (_, wanted)) in enumerate(zip(results[0], run.plans, strict=True)):
        assert found == wanted, step
    return run


@pytest.mark.parametrize("named", SETTINGS)
def test_ranks_carry_out_the_plans_of_one_with_equal_bits(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = check("llama", monkeypatch, **SETTINGS[named])
    assert any(result.logprobs for _, result in run.plans)
    assert run.counters["cached_tokens"] > 0
    assert (run.counters["retractions_kept"] > 0) == ("host" in named)
    assert (run.counters["replayed_steps"] > 0) == (named != "eager")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("named", SETTINGS)
@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3", "qwen3_5_text", "falcon_h1", "gemma4_text"])
def test_ranks_of_other_types_carry_out_the_plans_of_one(
    case: str, named: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, monkeypatch, quantization=quantization, **SETTINGS[named])


@pytest.mark.slow
def test_four_ranks_with_a_recurrence_carry_out_the_plans_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check("mamba2", monkeypatch, size=4, page_size=4)


class Failing(Eager):
    """A backend of graphs without memory for one."""

    captures_prompts = False

    def capture(self, step: Any) -> Any:
        raise MemoryError("no memory left on the device")


def test_rank_on_which_a_capture_fails_ends_all() -> None:
    """Others may be in exchanges of the capture, which this rank does not come to. One rank goes on without graphs."""

    def captured(model: Model, ops: Ops, exchange: Exchange) -> ModelRunner:
        sizes = PoolSizes(num_slots={"kv": 8}, page_size=4, max_running_requests=2, context_length=16)
        options: dict[str, Any] = {"sizes": sizes, "max_num_tokens": 8, "vocab_size": 99, "types": CacheTypes()}
        runner = build_runner(model, ops=ops, device="cpu", exchange=exchange, graphs=Failing(), **options)
        runner.capture_next()
        return runner

    path, (ops,) = shared_tiny("llama").path, ops_of_ranks("native", 1)
    assert not captured(model_of(path, ops), ops, ALONE).decode.captured.graphs
    with pytest.raises(LostRank):
        on_ranks(path, captured)
