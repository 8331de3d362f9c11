"""`GET /debug/explain/{id}`: what became of a request, and what would have made it faster.

Each key sees its own last requests. An explanation has numbers and names, and nobody's text.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Final, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import NotFound
from forebay.http.route import Access, Forward, Route
from forebay.requests.updates import WaitedFor
from forebay.server.api.core.ended import MOST_ENDED, Ended
from forebay.server.context import RequestContext, ServerContext

LONG_WAIT_S: Final = 0.1  # below, nothing is said of a wait

_OF_MISS: Final[Mapping[str, str]] = {
    "cache_disabled": "start the server without --disable-radix-cache",
    "no_shared_prefix": "begin prompts alike: texts that stay before those that change",
    "diverged": "send what was sent before without a change; put texts that change behind it",
    "not_cached_yet": "send the same beginning again: it is cached now",
    "evicted": "more memory for the cache (--kv-cache-bytes, --host-cache-bytes), or cache_control",
    "evicted_from_disk": "a larger --prefix-cache-bytes",
    "not_loaded_in_time": "a faster disk, or more host memory (--host-cache-bytes)",
    "released": "--keep-prefix-cache keeps prefixes over a sleep",
    "kv_present_state_missing": "more states (--max-mamba-cache-size), or mark the place with cache_control",
    "kv_present_window_missing": "a larger --swa-full-tokens-ratio, or mark the place with cache_control",
    "prompt_logprobs": "leave prompt_logprobs out",
}
_OF_WAIT: Final = {
    WaitedFor.TURN: "fewer long prompts before it, or a larger --chunked-prefill-size",
    WaitedFor.ROW: "a larger --max-running-requests, or another server",
    WaitedFor.MEMORY: "more memory for the KV cache, or a smaller max_tokens",
}
_OF_RETRACTION: Final = "more memory for the KV cache, or a larger --schedule-conservativeness"


class Explanation(TypedDict):
    """Account of a request. Times are seconds. `matched_tokens` are the tokens of its prompt that were cached, by
    kind of cache. `nearest_prefix` is the length of the cached prefix that it shared longest; `difference` says why
    it left that, if it is one of the same session. `would_help` is empty if nothing would have."""

    id: str
    server: str
    route: str
    model: str
    arrived: float
    waited_s: float
    waited_for: str
    chunks: int
    first_token_s: float | None
    total_s: float
    retractions: int
    recomputed_tokens: int
    output_tokens: int
    finish: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    matched_tokens: dict[str, int]
    tiers: dict[str, int]
    miss_reason: str
    nearest_prefix: int
    difference: str | None
    would_help: list[str]


async def explain(request: Request, server: ServerContext) -> Response:
    """Explain one of the last requests of the caller's key. Raises NotFound for any other."""
    context, wanted = RequestContext.of(request.scope), str(request.path_params["request_id"])
    names = (wanted, wanted.partition("-")[2], wanted.partition("_")[2])  # an answer's id has a prefix
    ended = server.ended.get(context.tenant.name, ())
    found = next((one for one in reversed(ended) if one.request_id in names), None)
    if found is None:
        what = f"no request {wanted[:128]!a} is among the last {MOST_ENDED} of this key that were answered here"
        raise NotFound(what, code="request_not_found")
    name = f"{socket.gethostname()}:{server.config.port}"
    return Response(msgspec.json.encode(explanation_of(found, name)), media_type="application/json")


def explanation_of(ended: Ended, server: str) -> Explanation:
    """Return the explanation of a request that the named server has answered."""
    cache, memory, history = ended.cache, ended.memory, ended.history
    return Explanation(
        id=ended.request_id,
        server=server,
        route=ended.route,
        model=ended.model,
        arrived=round(ended.ended_at - ended.total_s, 3),
        waited_s=round(history.waited_s, 4),
        waited_for=history.waited_for,
        chunks=history.num_chunks,
        first_token_s=None if ended.first_token_s is None else round(ended.first_token_s, 4),
        total_s=round(ended.total_s, 4),
        retractions=memory.retractions,
        recomputed_tokens=memory.recomputed_tokens,
        output_tokens=ended.output_tokens,
        finish=ended.finish,
        error=ended.error,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=cache.cached_tokens,
        matched_tokens={"kv": cache.kv_tokens, **cache.resumable},
        tiers=cache.tiers,
        miss_reason=cache.miss_reason,
        nearest_prefix=max(cache.kv_tokens, cache.differs_at),
        difference=ended.differs,
        would_help=list(_help(ended)),
    )


def _help(ended: Ended) -> Iterator[str]:
    if ended.cache.miss_reason in _OF_MISS:
        yield _OF_MISS[ended.cache.miss_reason]
    if ended.history.waited_s >= LONG_WAIT_S and ended.history.waited_for in _OF_WAIT:
        yield _OF_WAIT[ended.history.waited_for]
    if ended.memory.retractions:
        yield _OF_RETRACTION


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/debug/explain/{request_id}",
        explain,
        answer=Explanation,
        text="What became of one of the last 1,000 requests of the key, and what would have made it faster.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
)
