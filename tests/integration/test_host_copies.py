"""C26: what the scheduler believes to be on the host is there, byte for byte, after every step, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Result, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["falcon_h1", "glm_moe_dsa", "lfm3", "gpt_oss"])
def test_host_copies_take_the_bytes_that_the_scheduler_counts(case: str, seed: int) -> None:
    rng = random.Random(seed)
    path = shared_tiny(case).path
    rig = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128)
    engine = rig.engine(
        page_size=4,
        num_tokens=100,
        chunked_prefill_size=16,
        radix_cache=seed % 2 == 0,
        schedule_conservativeness=0.0,
        retraction_host_bytes=rng.choice([60_000, 1 << 30]),
    )
    pools, copies, most = engine.core.scheduler.pools, engine.core.scheduler.memory.host_copies, 0

    def after_a_step(number: int, result: Result) -> bool:
        nonlocal most
        on_host = engine.bytes_on_host()
        assert on_host == copies.num_bytes or (on_host > copies.num_bytes and pools.draft.drops)
        most = max(most, copies.num_bytes)
        return rng.random() < 0.002

    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 8))] for _ in range(8)]
    engine.run(prompts, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), abort=after_a_step)
    assert most > 0
    engine.run([[5]], SamplingParams(max_tokens=1))  # drops, too, come with a plan
    assert engine.bytes_on_host() == copies.num_bytes == 0
