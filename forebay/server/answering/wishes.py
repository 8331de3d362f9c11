"""Conversion of a body's sampling fields to the engine's parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.engine.choice import Prompt
from forebay.engine.frames import Ready
from forebay.requests.sampling_params import SamplingParams
from forebay.scheduler.limits import check_context
from forebay.server.context import ServerContext
from forebay.server.protocol.requests import I32, ChatRequest, CompletionRequest


def params_of(
    server: ServerContext, body: CompletionRequest | ChatRequest, *, num_top: int, prompt_logprobs: int = -1
) -> SamplingParams:
    """All but the seed, and bad words; the model's own where the client says nothing."""
    values: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "logit_bias": None if body.logit_bias is None else {int(key): bias for key, bias in body.logit_bias.items()},
    }
    return msgspec.structs.replace(
        server.sampling,
        max_tokens=I32 if body.wanted is None else max(1, body.wanted),
        min_tokens=body.min_tokens,
        n=body.choices,
        stop=body.stop_strings,
        stop_regex=body.stop_patterns,
        include_stop_str_in_output=body.include_stop_str_in_output,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=num_top,
        prompt_logprobs=prompt_logprobs,
        grammar=next((asked.grammar for asked in body.grammars), None),
        **{name: value for name, value in values.items() if value is not None},
    )


def with_room(
    params: SamplingParams, prompts: list[Prompt], wanted: int | None, info: Ready, *, cut: bool
) -> SamplingParams:
    """`params` with `max_tokens`: what was asked for, or what the context has left. Raises InvalidRequest and
    RequestTooLarge; with `cut` not for an answer that may be asked to be longer than there is room."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    asked = None if wanted is None else max(1, wanted)
    for length in (min(lengths), max(lengths)):
        check_context(length, None if cut else asked, info.context_length)
    room = info.context_length - max(lengths)
    if cut and asked is not None:
        asked = min(asked, room, max(1, info.max_total_tokens - max(lengths)))
    return msgspec.structs.replace(params, max_tokens=room if asked is None else asked)


async def with_words(server: ServerContext, params: SamplingParams, words: list[str]) -> SamplingParams:
    if not words:
        return params
    found = await server.workers.run(server.tokenizer.spellings, words, size=sum(map(len, words)))
    return msgspec.structs.replace(params, bad_words=found)
