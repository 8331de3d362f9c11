"""Limits that refuse a request, with the numbers: too many tokens, too many requests; and which request has to leave.
The server asks here first what it can know before the engine does."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.base.errors import EngineError, InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge, Unavailable
from forebay.base.room import Room
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.holding import footprint
from forebay.requests.request import Request, Status


def check_context(num_prompt: int, max_tokens: int | None, context_length: int) -> None:
    """Raise InvalidRequest or RequestTooLarge for a prompt that is empty, or too long together with its output (None:
    the rest of the context; 0 for a pooled prompt)."""
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    wanted = num_prompt + (1 if max_tokens is None else max_tokens)
    if wanted > context_length and max_tokens == 0:
        raise RequestTooLarge(
            f"there are {num_prompt} tokens; the context holds {context_length}: send fewer at a time"
        )
    if wanted > context_length:
        asked = "one more" if max_tokens is None else f"max_tokens is {max_tokens}"
        raise RequestTooLarge(
            f"the prompt has {num_prompt} tokens and {asked}, together {wanted}; the context holds {context_length}: "
            "shorten the prompt or lower max_tokens",
            param="max_tokens" if num_prompt < context_length else None,
        )


def check_fits(req: Request, config: SchedulerConfig, num_pages: int) -> None:
    """Raise InvalidRequest or RequestTooLarge for a request that even an idle engine, with `num_pages` pages, could not
    finish."""
    _check_kind(req, config)
    check_context(req.num_prompt, req.params.num_generated, config.context_length)
    pages = footprint(req.max_kv_len, config.page_size)
    if pages > num_pages:
        raise RequestTooLarge(
            f"the prompt has {req.num_prompt} tokens and max_tokens is {req.params.max_tokens}: that can need "
            f"{pages} KV pages of {config.page_size} tokens and there are {num_pages}: shorten the prompt, "
            "lower max_tokens, or give the KV cache more memory (--kv-cache-bytes)",
            code="kv_capacity_exceeded",
        )


def _check_kind(req: Request, config: SchedulerConfig) -> None:
    """Raise InvalidRequest for a request that no model of this kind can compute, with what it can."""
    pooling = req.params.pooling
    if config.text_encoder and pooling is None:
        raise InvalidRequest(
            "this model is a text encoder, which generates nothing: send its texts to /v1/embeddings, or pool them",
            code="not_a_decoder",
        )
    if config.text_encoder and pooling and pooling.token_ids:
        raise InvalidRequest(
            "this model is a text encoder, which scores no tokens: send texts to /v1/rerank", code="not_a_decoder"
        )
    if pooling and pooling.head and not config.head_outputs:
        raise InvalidRequest(
            "this model has no classification head: send texts to /v1/embeddings or /v1/rerank", code="no_labels"
        )
    if pooling and pooling.outputs and pooling.outputs[1] > config.head_outputs:
        raise InvalidRequest(
            f"outputs {pooling.outputs} were asked for; this model's head has {config.head_outputs}", code="no_labels"
        )


def nothing_may_follow(req: Request) -> InvalidRequest | None:
    """Where whatever a request allows is held back behind its tokens."""
    params, output = req.params, req.tokens[req.num_prompt :].tolist()
    held = set(req.stop_ids) if len(output) < params.min_tokens else set()
    for word in params.bad_words:
        assert isinstance(word, tuple), "a text was let in"
        start = len(output) - len(word) + 1
        if start >= 0 and output[start:] == list(word[:-1]):
            held.add(word[-1])
    if not params.allowed_token_ids or not held.issuperset(params.allowed_token_ids):
        return None
    return InvalidRequest(
        f"none of the {len(params.allowed_token_ids)} allowed_token_ids may follow the {len(output)} tokens of this "
        "output: min_tokens and bad_words hold them all back, allow more",
        code="nothing_allowed",
        param="allowed_token_ids",
    )


def most_requests(config: SchedulerConfig) -> int:
    """How many may be in the engine, running or queued."""
    return config.max_running_requests + config.max_queued_requests


def check_room(
    req: Request, config: SchedulerConfig, room: Room, num_waiting_tokens: int, own: Iterable[Request]
) -> None:
    """Raise Overloaded when as many requests are here as may run and wait, or too many prompt tokens wait, unless the
    tenant has fewer of them than its share. Its `own` requests wait.

    The first of a tenant to wait may be of any length: what fits must be able to come in.
    """
    room.check(req.tenant, most_requests(config))
    most = config.max_queued_tokens
    if num_waiting_tokens + req.num_prompt <= most:
        return
    num_own_tokens = sum(len(other.tokens) for other in own)
    if num_own_tokens and num_own_tokens + req.num_prompt > room.share(req.tenant, most):
        raise Overloaded(
            f"of the {most} prompt tokens that may be queued (--max-queued-tokens) fewer are left "
            f"than the {req.num_prompt} of this one: try again later"
        )


def overdue(req: Request, config: SchedulerConfig, now: float, admits: bool = True) -> EngineError | None:
    """Return the reason to end a request that queued, ran or stalled for too long; None for one that has time. How long
    another engine may take is not known here. While no request is admitted, a started request in the queue is not
    stalled.
    """
    error, age, still = None, now - req.arrival, now - req.last_progress
    if age > config.request_timeout_s:
        error = RequestTimeout(
            f"the request took {age:.1f} s; the limit is {config.request_timeout_s:g} s (--request-timeout)"
        )
    elif req.status in (Status.PENDING, Status.WAITING) and req.cache_report is None:  # it has never started
        if age > config.queue_timeout_s:
            error = RequestTimeout(
                f"the request queued for {age:.1f} s; the limit is {config.queue_timeout_s:g} s (--queue-timeout). "
                f"{config.max_running_requests} run at once (--max-running-requests), and it may come to "
                f"{req.max_kv_len} of the {config.num_pages * config.page_size} tokens that fit into the KV cache "
                "(--max-total-tokens): lower max_tokens, as a chat without it may take all that the context has left, "
                "or raise a limit"
            )
    elif still > config.stall_timeout_s and req.status is not Status.TRANSFERRING and (admits or req.maybe_allocation):
        error = RequestTimeout(
            f"no token for {still:.1f} s; the limit is {config.stall_timeout_s:g} s (--stall-timeout)"
        )
    if error and not admits and req.maybe_allocation is None:
        return Unavailable(
            f"the request has waited for {age:.1f} s, and the engine is asleep: try again later", code="asleep"
        )
    return error
