"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}`, in a body or inside a stream."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from forebay.base.errors import EngineError, ForebayError, RequestError, from_code
from forebay.base.log import event, get_logger
from forebay.requests.updates import Failure

DONE: Final = b"data: [DONE]\n\n"
MAX_MESSAGE_CHARS: Final = 1000

log = get_logger("server")


class HttpError(RequestError):
    """An error that only HTTP has: a method, media type or header that is refused."""

    def __init__(self, status: int, message: str, *, code: str, type: str = "invalid_request_error") -> None:
        super().__init__(message, code=code)
        self.status, self.type = status, type


def error_json(error: ForebayError) -> bytes:
    message = error.message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(
        {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_headers(error: ForebayError) -> dict[str, str]:
    if error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.code == "draining":
        return {"retry-after": "1", "connection": "close"}  # the next request is another server's
    if error.status == 503:
        return {"retry-after": "1"}
    return {}


def error_response(error: ForebayError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error_json(error),
        status_code=error.status,
        headers={**error_headers(error), **(headers or {})},
        media_type="application/json",
    )


def error_ending(error: ForebayError) -> bytes:
    """The same as the end of a stream whose status has been sent."""
    return b"data: " + error_json(error) + b"\n\n" + DONE


def from_failure(failure: Failure | None) -> ForebayError:
    """The engine's typed failure of one request."""
    if failure is None:
        return EngineError("the engine ended this request without saying why")
    return from_code(failure.kind, failure.message, failure.code)


def internal(error: BaseException, where: str) -> ForebayError:
    """A fault of ours: the client learns that there was one, the log learns which."""
    log.error(event("internal_error", where=where, kind=type(error).__name__), exc_info=error)
    return EngineError("the server failed to serve this request: see its log", code="internal_error")
