"""The marks by which a client asks that a prefix of its prompt is kept."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import StringConstraints

from forebay.server.protocol.strict import History

TTL_S: Final = {"5m": 300.0, "1h": 3600.0}  # by `ttl`; the first is the default
MOST_S: Final = 86_400.0  # that any prefix is kept after a use


class CacheControl(History):
    """A client's mark of a prefix that later requests will share, and how long it is kept after each use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        return TTL_S[self.ttl or "5m"]


_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


class HintedCacheControl(History):
    """An agent's hint that the prompt is kept, and for how long after each use: seconds, minutes or hours, cut to a
    day."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,3}[smh]$")] = "5m"

    @property
    def ttl_s(self) -> float:
        return min(int(self.ttl[:-1]) * _UNIT_S[self.ttl[-1]], MOST_S)


class AgentHints(History):
    """Hints that agents send for Dynamo. Those for its router are ignored."""

    cache_control: HintedCacheControl | None = None

    @property
    def ttl_s(self) -> float:
        """For how many seconds the prompt is kept; 0 if it is not."""
        return 0.0 if self.cache_control is None else self.cache_control.ttl_s
