"""The spans of a finished generation, from times that were recorded anyway."""

from __future__ import annotations

import time
from typing import Final

from forebay.base.errors import ForebayError
from forebay.config.engine_config import DisaggregationMode
from forebay.http.tracing import CLIENT_GONE, AttributeValue, Trace
from forebay.requests.updates import History
from forebay.server.api.core.generation import Generation, Usage
from forebay.server.context import RequestContext, ServerContext

_CHUNK: Final = "chunk"


def note_generation(
    server: ServerContext, context: RequestContext, trace: Trace, generation: Generation, usage: Usage
) -> None:
    """Put what a generation did into the trace of its request: spans, of several choices those of the first, and the
    attributes of the whole."""
    choice = generation.choices[0]
    first, last, now = generation.first_token_at, generation.last_token_at, time.monotonic()
    trace.add("tokenize", context.arrived_at, generation.started_at)
    computed = now if first is None else first
    _add_prompt(trace, generation.started_at, computed, choice.history, server.model.mode)
    if first is not None and last is not None and server.model.mode is not DisaggregationMode.PREFILL:
        trace.add("decode", first, last)
    elif first is not None:
        trace.add("transfer", first, now)
    note_tokens(trace, context, usage.prompt_tokens, usage.cache.cached_tokens)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": [str(choice.finish or "abort") for choice in generation.choices],
        "gen_ai.latency.time_in_queue": choice.history.waited_s,
        "gen_ai.latency.e2e": now - context.arrived_at,
        "forebay.cache.miss_reason": usage.cache.miss_reason,
        "forebay.retractions": usage.cache.retractions,
        "forebay.recomputed_tokens": usage.cache.recomputed_tokens,
        "forebay.server": _process(server.model.mode),
        "forebay.weight_version": usage.weight_version,
    }
    if first is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first - context.arrived_at
    if choice.speculation is not None:
        attributes["forebay.spec.accepted_per_step"] = choice.speculation.accepted_per_step
    trace.root.attributes |= attributes
    if generation.disconnected:
        trace.error = CLIENT_GONE
    elif isinstance(generation.error, ForebayError):
        trace.error = generation.error.code


def note_tokens(trace: Trace, context: RequestContext, num_tokens: int, num_cached: int) -> None:
    """Name the root by its model, and say how many tokens its prompts had, and how many of them were cached."""
    trace.root.name = f"{trace.root.attributes['gen_ai.operation.name']} {context.model}"
    trace.root.attributes |= {
        "gen_ai.request.model": context.model,
        "gen_ai.usage.input_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": num_cached,
    }


def _process(mode: DisaggregationMode) -> str:
    return "server" if mode is DisaggregationMode.NULL else f"{mode}-server"


def _add_prompt(trace: Trace, started: float, ended: float, history: History, mode: DisaggregationMode) -> None:
    """Add the spans of a prompt that was computed, or on a decode server received, up to its first token."""
    begun = min(ended, started + history.waited_s)
    trace.add("queue", started, begun)
    chunks = [(_CHUNK, min(ended, started + end)) for end in history.chunk_ends_s]
    trace.add("transfer" if mode is DisaggregationMode.DECODE else "prefill", begun, ended, chunks)
