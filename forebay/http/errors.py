"""Errors as clients see them, in a body or at the end of a stream.

OpenAI's `{"error": {"message", "type", "param", "code"}}`, and on Anthropic's routes `{"type": "error", "error":
{"type", "message", "details": {"error_code"}}}`, whose message must name the field. llama-server's clients get
`{"error": {"code", "message", "type"}}` with the status as the code; Ollama's get `{"error": message}`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from starlette.responses import Response

from forebay.base.errors import EngineError, ForebayError, RequestError
from forebay.base.log import event, get_logger
from forebay.requests.updates import Failure

DONE: Final = b"data: [DONE]\n\n"
MAX_MESSAGE_CHARS: Final = 1000
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
UNSUPPORTED_ENCODING: Final = "unsupported_content_encoding"
OLLAMA: Final = "/api/"  # begins each of its routes
LLAMA_SERVER: Final = frozenset({"/completion", "/apply-template", "/props", "/slots"})
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_LLAMA_SERVER_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class Error(msgspec.Struct, kw_only=True):
    """An error in OpenAI's format; `code` is stable and meant for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Every refusal and every failure, in a body or as an event of a stream."""

    error: Error


class AnthropicDetails(msgspec.Struct, kw_only=True):
    """Our own code for an error in Anthropic's format."""

    error_code: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """An error in Anthropic's format."""

    type: str
    message: str
    details: AnthropicDetails


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True):
    """The error body of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicError


class LlamaError(msgspec.Struct, kw_only=True):
    """An error in llama-server's format; `code` is the HTTP status."""

    code: int
    message: str
    type: str
    param: str | None


class LlamaErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of an error for llama-server's clients."""

    error: LlamaError


class OllamaError(msgspec.Struct, kw_only=True):
    """The body of an error for Ollama's clients."""

    error: str


log = get_logger("server")


class HttpError(RequestError):
    """An error that only HTTP has: a method, media type or header that is refused."""

    def __init__(self, status: int, message: str, *, code: str, type: str = "invalid_request_error") -> None:
        super().__init__(message, code=code)
        self.status, self.type = status, type


def shown(error: ForebayError) -> str:
    """The message as it is sent: bounded, and text."""
    return error.message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")


def speaks_anthropic(path: str) -> bool:
    """Return whether errors of this path have Anthropic's format."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_json(error: ForebayError, path: str) -> bytes:
    """Return the body of an answer to a request for `path`, "" if the path is unknown."""
    message = shown(error)
    if path in LLAMA_SERVER:
        return msgspec.json.encode(LlamaErrorAnswer(error=_llama_server_error(error, message)))
    speaks_ollama = path.startswith(OLLAMA)
    if not (speaks_ollama or speaks_anthropic(path)):
        openai = Error(message=message, type=error.type, param=error.param, code=error.code)
        return msgspec.json.encode(ErrorAnswer(error=openai))
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    if speaks_ollama:
        return msgspec.json.encode(OllamaError(error=message))
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = AnthropicDetails(error_code=error.code)  # clients retry some requests in another form, by this code
    answer = AnthropicErrorAnswer(type="error", error=AnthropicError(type=kind, message=message, details=details))
    return msgspec.json.encode(answer)


def _llama_server_error(error: ForebayError, message: str) -> LlamaError:
    kind = _LLAMA_SERVER_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return LlamaError(code=error.status, message=message, type=kind, param=error.param)


def error_headers(error: ForebayError) -> dict[str, str]:
    """Return the headers that belong to an error: when to retry, or how to authenticate."""
    if error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.code == "draining":
        return {"retry-after": "1", "connection": "close"}  # the next request is another server's
    if error.status == 503:
        return {"retry-after": "1"}
    return {}


def error_response(error: ForebayError, path: str, headers: dict[str, str] | None = None) -> Response:
    """Return the error as an answer, in the format of the path's dialect."""
    return Response(
        error_json(error, path),
        status_code=error.status,
        headers={**error_headers(error), **(headers or {})},
        media_type="application/json",
    )


def error_ending(error: ForebayError, path: str) -> bytes:
    """Return an error as the end of a stream whose status has been sent, for callers that know nothing else of the
    stream."""
    if speaks_anthropic(path):
        return b"event: error\ndata: " + error_json(error, path) + b"\n\n"
    if path == RESPONSES:
        event = {"type": "error", "code": error.code, "message": shown(error), "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    if path.startswith(OLLAMA):
        return error_json(error, path) + b"\n"
    ended = b"" if path in LLAMA_SERVER else DONE
    return b"data: " + error_json(error, path) + b"\n\n" + ended


def from_failure(failure: Failure | None) -> ForebayError:
    """The engine's typed failure of one request."""
    if failure is None:
        return EngineError("the engine ended this request without saying why")
    return failure.error


def internal(error: BaseException, where: str) -> ForebayError:
    """A fault of ours: the client learns that there was one, the log learns which."""
    log.error(event("internal_error", where=where, kind=type(error).__name__), exc_info=error)
    return EngineError("the server failed to serve this request: see its log", code="internal_error")
