"""A route, declared once. The application, the access rules, /openapi.json, the router and the guide derive from it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"

_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")

State = TypeVar("State")
Handler = Callable[[Request, State], Awaitable[Response]]


class Access(Enum):
    """The key that a route needs; later ones are stricter. Each value is the text of the guide's table."""

    FILE = "no key; pages of other sites may link to it"
    PROBE = "no key"
    MEMBER = "a user's key, or a router's proof of the cluster key"
    USER = "a user's key"
    TOTALS = "a user's key; an admin key if prefix caches are kept apart"
    CLUSTER = "a proof of the cluster key"
    ADMIN = "an admin key"


class Forward(Enum):
    """Which servers a router sends the requests of a route to."""

    PAIR = "one server, or a prefill and a decode server"
    PROMPT = "one server that computes prompts"
    ANY = "any one server"
    ALL = "every server"
    OWN = "none: the router has a handler of its own"
    NONE = "none: a router does not have the route"


@dataclass(frozen=True, slots=True)
class Route(Generic[State]):
    """A path with its handler, whose `State` is the server's or the router's.

    `body` and `answer` are the types of the request's body and of the answer with status 200. `stream` is the media
    type of a streamed answer, "" for a route without one. `unavailable` is the type of a 503 that is no error.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler[State]
    _: KW_ONLY
    access: Access
    forward: Forward
    text: str
    answer: Any
    media: str = JSON
    stream: str = ""
    body: type[BaseModel] | None = None
    unavailable: Any = None
    empties_cache: bool = False  # a server's prefix cache is empty, or of no use, after its success

    def __post_init__(self) -> None:
        if not isinstance(self.access, Access):
            raise TypeError(f"{self.method} {self.path} has access={self.access!r}: give one of {[*Access]}")

    @property
    def name(self) -> str:
        """The name of the operation in /openapi.json."""
        return self.handler.__name__

    @property
    def template(self) -> str:
        """The path with its parameters in braces, as /openapi.json writes it."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names of the path's parameters."""
        return _PARAMETER.findall(self.path)
