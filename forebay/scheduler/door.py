"""Who is refused at once, with the numbers, because it can never fit or the queue is full; and who has to leave."""

from __future__ import annotations

from forebay.base.errors import InvalidRequest, Overloaded, RequestTooLarge
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.footprint import footprint
from forebay.requests.request import Request, Status


def check_fits(req: Request, config: SchedulerConfig, num_pages: int) -> None:
    """Raise InvalidRequest or RequestTooLarge for a request that even an idle engine, with `num_pages` pages, could not
    finish."""
    if req.num_prompt == 0:
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    wanted = req.num_prompt + req.params.max_new_tokens
    if wanted > config.context_length:
        raise RequestTooLarge(
            f"the prompt has {req.num_prompt} tokens and max_tokens is {req.params.max_new_tokens}, together {wanted}; "
            f"the context holds {config.context_length}: shorten the prompt or lower max_tokens"
        )
    pages = footprint(req.max_kv_len, config.page_size).pages
    if pages > num_pages:
        raise RequestTooLarge(
            f"the prompt has {req.num_prompt} tokens and max_tokens is {req.params.max_new_tokens}: that can need "
            f"{pages} KV pages of {config.page_size} tokens and there are {num_pages}: shorten the prompt, "
            "lower max_tokens, or give the KV cache more memory (--kv-cache-bytes)",
            code="kv_capacity_exceeded",
        )


def check_room(req: Request, config: SchedulerConfig, num_requests: int, num_waiting_tokens: int) -> None:
    """Raise Overloaded when as many requests are here as may run and wait, or too many prompt tokens wait.

    The first to wait may be of any length: what fits must be able to come in.
    """
    room = config.max_running_requests + config.max_queued_requests
    if num_requests >= room:
        raise Overloaded(
            f"{num_requests} requests are running or queued and {room} may be ({config.max_running_requests} running, "
            f"{config.max_queued_requests} queued): try again later"
        )
    if num_waiting_tokens and num_waiting_tokens + req.num_prompt > config.max_queued_tokens:
        raise Overloaded(
            f"of the {config.max_queued_tokens} prompt tokens that may be queued (--max-queued-tokens) fewer are left "
            f"than the {req.num_prompt} of this one: try again later"
        )


def overdue(req: Request, config: SchedulerConfig, now: float) -> str | None:
    """Why a request that queued, ran or stood still for too long has to end; None for one that has time."""
    age, still = now - req.arrival, now - req.last_progress
    if age > config.request_timeout_s:
        return f"the request took {age:.1f} s; the limit is {config.request_timeout_s:g} s (--request-timeout)"
    if req.status is Status.WAITING and req.cache_report is None:  # it has never started
        if age > config.queue_timeout_s:
            return f"the request queued for {age:.1f} s; the limit is {config.queue_timeout_s:g} s (--queue-timeout)"
    elif still > config.stall_timeout_s:
        return f"no token for {still:.1f} s; the limit is {config.stall_timeout_s:g} s (--stall-timeout)"
    return None
