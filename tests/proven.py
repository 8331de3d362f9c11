"""A sender with the cluster key, for tests: it proves each of its messages."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from forebay.base.proof import BOOTSTRAP, PROOF, Message, digest_of, prove


class Proven(httpx.Auth):
    """Adds the header with the proof to each request of an httpx client."""

    requires_request_body = True

    def __init__(self, cluster_key: bytes) -> None:
        self._key = cluster_key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers[PROOF] = proof_for(self._key, request)
        yield request


def proof_for(cluster_key: bytes, request: httpx.Request, now_s: float | None = None) -> str:
    """Return the proof for one request."""
    bootstrap = {name: value for name, value in request.headers.items() if name.startswith(BOOTSTRAP)}
    message = Message(
        method=request.method,
        target=request.url.raw_path.decode(),
        host=request.headers["host"],
        bootstrap=bootstrap,
    )
    return prove(cluster_key, message, digest_of(request.content), now_s)
