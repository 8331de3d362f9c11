"""How much work an engine does before a tenant's request has its first token, beside 250 requests of another (C32).

Work is counted in tokens of prompts: a step takes as long as `STEP_COST` of them and its own. The figures are those of
a model of 259 M weights on one core, as is the time of a token, by which the scheduler's patience ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

import pytest

from forebay.engine.loop.core import work_of
from forebay.requests.account import PATIENCE_S
from forebay.requests.request import Request
from tests.pictures import picture, picture_config, with_placeholders
from tests.scheduler.rig import Rig

STEP_COST: Final = 32.0
TOKEN_S: Final = 0.84e-3
BEYOND: Final = PATIENCE_S / TOKEN_S + 512  # tokens, 0.7 s: other tenants' patience, and the chunk of a step in flight
NUM_REQUESTS: Final = 250

_PROMPTS = count(1)


class Busy:
    """An engine of two tenants of one weight. `work` is what its steps have cost."""

    def __init__(self, kind: str | None) -> None:
        self.rig = Rig(
            depth=1,
            overlap_depth=1,
            tenants={"a": 1, "b": 1},
            page_size=16,
            num_pages=8 * 128,
            context_length=2048,
            chunked_prefill_size=512,
            mixed_chunk_size=96,
            max_queued_requests=8 * NUM_REQUESTS,
            max_queued_tokens=1 << 24,
            pictures=picture_config(num_blocks=40, num_pixels=8 * NUM_REQUESTS, layer_tokens=43.0),
        )
        self.rig.scheduler.queues.step_cost = STEP_COST
        self.work = 0.0
        for _ in range(NUM_REQUESTS if kind else 0):
            KINDS[kind](self.rig, "a", 256)
        for _ in range(50 if kind else 0):
            self.step()

    def step(self) -> None:
        plan = self.rig.launch()
        if plan is not None:
            cost = STEP_COST + work_of(plan, self.rig.scheduler.config.pictures)
            self.work += cost
            self.rig.now += cost * TOKEN_S
        if len(self.rig.flights) > self.rig.depth or plan is None:
            self.rig.commit()

    def work_until_first_token(self, kind: str) -> float:
        before, req = self.work, KINDS[kind](self.rig, "b", 1)
        while not self.rig.tokens_of(req):
            self.step()
        return self.work - before


def words(rig: Rig, tenant: str, max_new: int, num_tokens: int = 16) -> Request:
    return rig.add([1000 + next(_PROMPTS) % 900, *range(100, 99 + num_tokens)], max_new, tenant=tenant)


def choices(rig: Rig, tenant: str, max_new: int) -> Request:
    prompt = [1000 + next(_PROMPTS) % 900, *range(100, 1599)]
    first, *_ = [rig.add(prompt, max_new, tenant=tenant) for _ in range(8)]
    return first


def image(rig: Rig, tenant: str, max_new: int) -> Request:
    """Five tiles: encoding them costs 860 tokens, and the prompt has 324."""
    shown = picture(next(_PROMPTS), *range(20, 320, 64), num_tiles=5)
    return rig.add(with_placeholders([*range(100, 424)], [shown]), max_new, pictures=[shown], tenant=tenant)


KINDS: Final[dict[str, Callable[[Rig, str, int], Request]]] = {
    "words": words,
    "prompts": lambda rig, tenant, max_new: words(rig, tenant, max_new, 1500),
    "choices": choices,
    "images": image,
}


@pytest.mark.parametrize("kind", ["words", "images"])
@pytest.mark.parametrize("other", KINDS)
def test_c32_request_has_its_first_token_within_a_bound_beyond_what_its_tenants_share_gives(
    kind: str, other: str
) -> None:
    """Of several in a row: what the tenant was given before is taken into account. It owns half of the engine."""
    alone, busy = Busy(None).work_until_first_token(kind), Busy(other)
    waits = [busy.work_until_first_token(kind) - 2 * alone for _ in range(3)]
    assert max(waits) <= BEYOND, waits
