"""The flight recorder: /flight_recorder."""

from __future__ import annotations

from typing import Annotated, Final, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.context import ServerContext


class RecordingAnswer(TypedDict):
    """The answer of /flight_recorder."""

    path: Annotated[str, msgspec.Meta(description="The file, on the server's machine")]


async def write_recording(request: Request, server: ServerContext) -> Response:
    """Write the flight recorder to a file, and return its path. Its content is never sent."""
    return json_response(RecordingAnswer(path=str(await server.engine.link.recordings.write("POST /flight_recorder"))))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/flight_recorder",
        write_recording,
        answer=RecordingAnswer,
        text="Write the flight recorder to a file on the server's machine, for `forebay replay`.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
)
