"""The marks by which a client asks that a prefix of its prompt is kept."""

from __future__ import annotations

from typing import Final, Literal

from forebay.server.protocol.strict import History

TTL_S: Final = {"5m": 300.0, "1h": 3600.0}  # by `ttl`; the first is the default


class CacheControl(History):
    """A client's mark of a prefix that later requests will share, and how long it is kept after each use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl or "5m"]
