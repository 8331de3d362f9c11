"""What the scheduler records of prompts that end, for estimates of larger prefix caches."""

from __future__ import annotations

from forebay.requests.sampling_params import SamplingParams
from tests.scheduler.rig import Rig

PROMPT = list(range(16))


def reuse(rig: Rig, tenant: str = "") -> tuple[int, int, list[int]]:
    found = rig.scheduler.pools.ghosts.estimates()[tenant]
    return found.prompt_tokens, found.reused_tokens, list(found.by_tier["device"])


def ask(rig: Rig, prompt: list[int] | int, **more) -> None:
    rig.add(prompt, max_new=1, **more)
    rig.run()


def test_ghosts_remember_what_was_evicted() -> None:
    rig = Rig(num_pages=16)
    ask(rig, PROMPT)
    for _ in range(2):
        ask(rig, 40)  # of 16 pages 10 each
    ask(rig, PROMPT)
    assert reuse(rig) == (112, 0, [0, 12, 12])
    ask(rig, PROMPT)
    assert reuse(rig) == (128, 12, [12, 24, 24])


def test_ghosts_are_by_tenant_and_count_nothing_that_is_never_reused() -> None:
    rig = Rig(tenants={"a": 1})
    for _ in range(2):
        ask(rig, PROMPT, tenant="a")
        ask(rig, PROMPT, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert reuse(rig, "a") == (32, 12, [12, 12, 12])
    assert rig.scheduler.pools.ghosts.estimates().keys() == {"a"}


def test_ghosts_are_none_without_a_prefix_cache_and_gone_after_a_flush() -> None:
    assert Rig(radix_cache=False).scheduler.pools.ghosts is None
    rig = Rig()
    ask(rig, PROMPT)
    rig.scheduler.flush_cache()
    ask(rig, PROMPT)
    assert reuse(rig) == (32, 0, [0, 0, 0])


def test_ghosts_of_requests_that_ended_before_a_token_are_not_counted() -> None:
    rig = Rig(chunked_prefill_size=8)
    req = rig.add(PROMPT)
    rig.step()
    rig.abort(req.id)
    rig.run()
    assert rig.scheduler.pools.ghosts.estimates() == {}
