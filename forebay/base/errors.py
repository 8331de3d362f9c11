"""Every error a user can meet.

    ForebayError
    +-- ConfigError             the configuration cannot work            (exit 2)
    |   +-- NotEnoughMemory     weights and one request do not fit
    +-- ModelError              the checkpoint cannot be served          (exit 2)
    +-- RequestError            one request cannot be served             (4xx)
    |   +-- InvalidRequest      a field is wrong                         400
    |   +-- RequestTooLarge     it can never fit                         400
    |   +-- Unauthorized        no or a wrong key                        401
    |   +-- NotFound            no such route or model                   404
    |   +-- Conflict            not in the state that it is in       409
    |   +-- PayloadTooLarge     the body or prompt is over a limit       413
    |   +-- Overloaded          the queue is full, try again             429
    +-- EngineError             the engine failed this request           (5xx)
        +-- RequestTimeout      queued, ran or stalled for too long      504
        +-- NumericalError      its logits were not finite               500
        +-- Unavailable         starting, draining or dead               503
    +-- GenerationError         some prompts of a call of `LLM` failed

Each carries a stable machine `code`, OpenAI's error `type`, an HTTP `status`, and a message that says what happened,
with the numbers, and what to do. Faults of ours are assertions, not these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


def brief(value: object) -> str:
    """Return an untrusted value for a message: on one line, and shortened."""
    text = str(value)[:80]
    return text if isinstance(value, int | float) else repr(text)


class ForebayError(Exception):
    """Base of all errors that a user can see, with the HTTP status, type and code that the server answers with."""

    status: int = 500
    type: str = "server_error"
    retry_after_s: int | None = None  # a hint for the client
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param


class ConfigError(ForebayError):
    """Invalid flags, environment or configuration file; raised before the engine starts."""

    default_code = "invalid_config"


class NotEnoughMemory(ConfigError):
    """The memory does not hold the weights, or the caches of a single request."""


class ModelError(ForebayError):
    """A checkpoint that is incomplete, malformed or of an architecture that is not implemented."""

    default_code = "invalid_model"


class RequestError(ForebayError):
    """Base of the errors that the client caused; a retry of the same request fails again."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class InvalidRequest(RequestError):
    """A field of the request has an invalid value (400); `param` names the field."""

    default_code = "invalid_value"


class RequestTooLarge(RequestError):
    """Prompt and `max_tokens` exceed the context length or the KV cache (400)."""

    default_code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The API key is missing or unknown (401)."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotFound(RequestError):
    """The route, model or request id does not exist (404)."""

    status = 404
    type = "not_found_error"
    default_code = "not_found"


class Conflict(RequestError):
    """The request contradicts the current state of the server (409)."""

    status = 409
    default_code = "conflict"


class PayloadTooLarge(RequestError):
    """The HTTP body exceeds the size limit (413)."""

    status = 413
    default_code = "payload_too_large"


class Overloaded(RequestError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after_s = retry_after_s


class EngineError(ForebayError):
    """The engine failed on a valid request (500)."""

    default_code = "engine_error"


class RequestTimeout(EngineError):
    """The request did not finish within its deadline (504)."""

    status = 504
    default_code = "request_timeout"


class NumericalError(EngineError):
    """The model produced logits that are infinite or NaN."""

    default_code = "non_finite_logits"


class Unavailable(EngineError):
    """The server cannot take the request now, but may later (503); see `retry_after_s`."""

    status = 503
    type = "service_unavailable_error"
    default_code = "unavailable"


class OfferError(EngineError):
    """Raised if the offered or sent parts of a KV transfer do not fit together."""

    default_code = "transfer_incomplete"


class WireError(EngineError):
    """Raised if a peer engine sent bytes that are no frame of the session, or too many of them."""

    default_code = "wire_error"


class GenerationError(ForebayError):
    """Some prompts of one call failed; raised when all have ended. `failures` are their errors by the prompt's place in
    the call; `outputs` has what came of every prompt, those that did not fail included."""

    default_code = "generation_failed"

    def __init__(self, failures: Mapping[int, ForebayError], outputs: Sequence[Any]) -> None:
        place, first = next(iter(failures.items()))
        more = f"; {len(failures) - 1} more in `failures`" if len(failures) > 1 else ""
        super().__init__(
            f"{len(failures)} of {len(outputs)} prompts failed; prompt {place}: {first.message}{more}; `outputs` has "
            "what came of each"
        )
        self.failures = dict(failures)
        self.outputs = list(outputs)


_REBUILDABLE: tuple[type[ForebayError], ...] = (
    InvalidRequest,
    RequestTooLarge,
    NotFound,
    Conflict,
    Overloaded,
    RequestTimeout,
    NumericalError,
    Unavailable,
    EngineError,
    ConfigError,
    ModelError,
)


def from_code(name: str, message: str, code: str, param: str | None = None) -> ForebayError:
    """Rebuild an error that crossed a process boundary as (class name, message, code, field of the request)."""
    for kind in _REBUILDABLE:
        if kind.__name__ == name:
            return kind(message, code=code, param=param)
    return EngineError(message, code=code, param=param)
