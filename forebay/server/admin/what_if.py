"""`GET /debug/cache/what-if`: what more memory would bring the prefix cache.

A user sees the estimate for their own key, an admin those for all keys.
"""

from __future__ import annotations

from typing import Final, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.engine.frames import GetReuse, ReuseReport
from forebay.http.route import Access, Forward, Route
from forebay.memory.ghosts import FACTORS, Reuse
from forebay.server.context import RequestContext, ServerContext


class Size(TypedDict):
    """A tier with `factor` times its memory, `more_bytes` more than now: the estimated part of prompt tokens that would
    be reused."""

    tier: str
    factor: int
    more_bytes: int
    reuse: float


class KeyReuse(TypedDict):
    """The prompts of one key since the start: their tokens, the part of them that was reused, and what would be."""

    key: str
    prompt_tokens: int
    reuse: float
    sizes: list[Size]


class WhatIf(TypedDict):
    """The answer of /debug/cache/what-if; without a prefix cache it has no keys."""

    keys: list[KeyReuse]


async def what_if(request: Request, server: ServerContext) -> Response:
    """The part of prompt tokens that larger caches would reuse, by key."""
    tenant = RequestContext.of(request.scope).tenant
    report: ReuseReport = await server.engine.link.answer_to(GetReuse)
    keys = [
        _of_key(report, name, found)
        for name, found in sorted(report.tenants.items())
        if tenant.is_admin or name == tenant.name
    ]
    return Response(msgspec.json.encode(WhatIf(keys=keys)), media_type="application/json")


def _of_key(report: ReuseReport, name: str, found: Reuse) -> KeyReuse:
    """Return what was measured, and beside it the estimates: the measured part and the estimated difference."""
    total = max(1, found.prompt_tokens)
    sizes = [
        Size(
            tier=tier,
            factor=factor,
            more_bytes=(factor - 1) * num_bytes,
            reuse=round(min(1.0, (found.reused_tokens + reused - found.by_tier[tier][0]) / total), 4),
        )
        for tier, num_bytes in report.tiers.items()
        for factor, reused in zip(FACTORS[1:], found.by_tier[tier][1:], strict=True)
    ]
    return KeyReuse(
        key=name, prompt_tokens=found.prompt_tokens, reuse=round(found.reused_tokens / total, 4), sizes=sizes
    )


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/debug/cache/what-if",
        what_if,
        answer=WhatIf,
        text="What twice and four times the memory would bring the prefix cache.",
        access=Access.TOTALS,
        forward=Forward.NONE,
    ),
)
