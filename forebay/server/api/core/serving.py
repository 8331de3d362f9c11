"""The way of a request that generates: admit, tokenize, submit, answer, count."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Self

import msgspec
from starlette.responses import Response

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.base.sampling import NUMBERS
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.choice import Choice, Prompt
from forebay.http.lifecycle import ClientGone
from forebay.memory.retention import RetentionRequest
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import SpeculationReport
from forebay.scheduler.limits import check_context
from forebay.server.api.core.dialect import Dialect, EventStream, EventWriter, collect
from forebay.server.api.core.ended import Ended
from forebay.server.api.core.enforcing import enforced_grammar
from forebay.server.api.core.generation import Generation, Order, Usage
from forebay.server.api.core.images import with_images
from forebay.server.api.core.prompts import check_answerable, naming, prompt_ids, reading_of, render, unread_variables
from forebay.server.api.core.receipts import Receipt, receipt_of, seed_of, takes_receipt
from forebay.server.api.core.rendezvous import FIELDS, rendezvous_of
from forebay.server.api.core.spans import note_generation
from forebay.server.context import RequestContext, ServerContext
from forebay.server.protocol.requests import I32, RETENTION_S, ChatRequest, CompletionRequest
from forebay.server.protocol.validation import INVALID_COMBINATION, UNSUPPORTED_FIELD

log = get_logger("server")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedParams:
    """The parameters of a body. `values` have all but the seed and what depends on tokens: the number of tokens, and
    the spellings of `bad_words`.

    `max_tokens` is the requested number, None for the rest of the context. With `cut_to_room` a number that exceeds the
    context is reduced instead of refused.
    """

    values: SamplingParams
    max_tokens: int | None
    bad_words: Sequence[str] | None
    cut_to_room: bool

    @classmethod
    def of(
        cls,
        server: ServerContext,
        body: CompletionRequest | ChatRequest,
        *,
        num_top: int = -1,
        prompt_logprobs: int = -1,
        cut_to_room: bool = False,
    ) -> Self:
        """Read a body. Values that it does not have are the model's. `num_top` and `prompt_logprobs` are numbers of
        alternatives, -1 for no log-probabilities."""
        numbers: dict[str, Any] = {
            name: number.read(value) for name, number in NUMBERS.items() if (value := getattr(body, name)) is not None
        }
        if body.logit_bias is not None:
            numbers["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
        max_tokens = None if body.wanted is None else max(1, body.wanted)
        values = msgspec.structs.replace(
            server.sampling,
            max_tokens=I32 if max_tokens is None else max_tokens,
            min_tokens=body.min_tokens,
            n=body.choices,
            stop=tuple(body.stop or ()),
            stop_regex=tuple(body.stop_regex or ()),
            include_stop_str_in_output=body.include_stop_str_in_output,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            ignore_eos=body.ignore_eos,
            logprobs=num_top,
            prompt_logprobs=prompt_logprobs,
            grammar=next((asked.grammar for asked in body.grammars), None),
            **numbers,
        )
        return cls(values=values, max_tokens=max_tokens, bad_words=body.bad_words, cut_to_room=cut_to_room)

    async def complete(self, server: ServerContext, prompts: Sequence[Prompt], source: str) -> SamplingParams:
        """Return the parameters for these prompts, which are in the field `source`. Raises InvalidRequest and
        RequestTooLarge."""
        bad_words, max_tokens, info = self.values.bad_words, self.max_tokens, server.engine.info
        if self.bad_words:
            spellings, size = server.tokenizer.spellings, sum(map(len, self.bad_words))
            with naming("bad_words"):
                bad_words = await server.workers.run(server.client, spellings, self.bad_words, size=size)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        longest = max(lengths)
        with naming(source):
            for length in sorted({min(lengths), longest}):
                check_context(length, None if self.cut_to_room else max_tokens, info.context_length)
        room = info.context_length - longest
        if max_tokens is None:
            max_tokens = room
        elif self.cut_to_room:
            max_tokens = min(max_tokens, room, max(1, info.max_total_tokens - longest))
        return msgspec.structs.replace(self.values, max_tokens=max_tokens, bad_words=bad_words)


async def serve_chat(
    server: ServerContext,
    context: RequestContext,
    body: ChatRequest,
    dialect: Dialect,
    *,
    num_top: int = -1,
    cut_to_room: bool = False,
) -> Response:
    """Render, submit and answer a chat in `dialect`.

    `num_top` is the number of alternatives whose log-probabilities are returned for each token, -1 for no
    log-probabilities. With `cut_to_room` the output is limited to the rest of the context instead of refused. Raises
    InvalidRequest, and what admission raises.
    """
    check_answerable(body, server.model.answers)
    ignored = unread_variables(server.tokenizer, body)
    if body.verbosity is not None and "verbosity" not in server.model.answers.variables:
        ignored.append("verbosity")
    if body.requested_thinking.effort is not None and not server.model.answers.has_efforts:
        ignored.append("reasoning_effort")
    if ignored:
        context.note_ignored(ignored)

    in_parts = any(message.cache_control is not None or isinstance(message.content, list) for message in body.messages)
    has_places = any((in_parts, body.tools, body.cache_control, server.engine.info.wants_resume_points))

    async def prompts() -> list[Prompt]:
        if has_places:
            prompt = await _prompt_with_places(server, body)
        else:
            prompt = Prompt(token_ids=await render(server, server.tokenizer.encode_chat, body.messages, body))
        found = server.model.answers
        is_read = body.offered_tools or found.formats.thinking is not None
        reading = reading_of(body, found, server.tokenizer, prompt.token_ids) if is_read else None
        if reading is not None and not body.skip_special_tokens:
            what = "skip_special_tokens=false: the answer is read for thinking and calls, leave it out"
            raise InvalidRequest(what, code=INVALID_COMBINATION, param="skip_special_tokens")
        may_enforce = body.offered_tools or body.grammars or body.max_thinking_tokens is not None
        grammar = await enforced_grammar(server, body, prompt.token_ids) if may_enforce else None
        return [replace(prompt, reading=reading, grammar=grammar)]

    of_prompt = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    params = RequestedParams.of(server, body, num_top=num_top, prompt_logprobs=of_prompt, cut_to_room=cut_to_room)
    if in_parts:
        prompts = partial(with_images, server, context, body.messages, prompts)
    return await _serve(server, context, body, dialect, prompts, params)


async def _prompt_with_places(server: ServerContext, body: ChatRequest) -> Prompt:
    """Return the prompt of a chat, with the places behind which others will go on if the model or the client wants
    them."""
    marks, wants_points = body.marks, server.engine.info.wants_resume_points
    if not (marks or wants_points):
        return Prompt(token_ids=await render(server, server.tokenizer.encode_chat, body.messages, body))
    chat = await render(
        server,
        server.tokenizer.encode_chat_prompt,
        body.messages,
        body,
        breakpoints=[point for point, _ in marks],
        marks_alone=not wants_points,
    )
    ends = [end or len(chat.token_ids) for end in chat.marks]  # all of it if the template hides where a mark is
    retentions = [RetentionRequest(end, ttl_s) for end, (_, ttl_s) in zip(ends, marks, strict=True)]
    points = tuple(chat.resume_points) if wants_points else ()
    return Prompt(token_ids=chat.token_ids, resume_points=points, retentions=tuple(sorted(retentions)))


async def serve_completion(
    server: ServerContext,
    context: RequestContext,
    body: CompletionRequest,
    dialect: Dialect,
    *,
    known_as: str | None = None,
    cut_to_room: bool = False,
) -> Response:
    """Tokenize, submit and answer the prompts of a completion in `dialect`, as `serve_chat` does with a chat.
    `known_as` is the id under which the client may end it."""
    num_top, of_prompt = (-1 if asked is None else asked for asked in (body.logprobs, body.prompt_logprobs))
    of_prompt = max(num_top if body.echo else -1, of_prompt)
    params = RequestedParams.of(server, body, num_top=num_top, prompt_logprobs=of_prompt, cut_to_room=cut_to_room)

    async def prompts() -> list[Prompt]:
        return [
            Prompt(
                token_ids=await prompt_ids(server, body, prompt, "prompt"),
                text=prompt if isinstance(prompt, str) else None,
            )
            for prompt in body.prompts
        ]

    return await _serve(server, context, body, dialect, prompts, params, known_as=known_as)


def check_counts(server: ServerContext, n: int, num_prompts: int) -> None:
    """Raise InvalidRequest for more choices than `--max-n` or more prompts than `--max-prompts`."""
    config = server.config
    if n > config.max_n:
        raise InvalidRequest(f"n is {n}; at most {config.max_n} choices are made (--max-n)", param="n")
    if num_prompts > config.max_prompts:
        raise InvalidRequest(
            f"there are {num_prompts} prompts; at most {config.max_prompts} are taken (--max-prompts)", param="prompt"
        )


def _order(
    server: ServerContext,
    context: RequestContext,
    body: CompletionRequest | ChatRequest,
    params: SamplingParams,
    num_prompts: int,
) -> Order:
    """Return the order of a body, checked against the vocabulary and against what the engine looks at. Raises
    InvalidRequest, for a text encoder whatever the body says."""
    if server.model.texts.encoder is not None:
        raise server.model.texts.not_a_decoder(server.model.texts.encoder)
    params.of_tokens().check(server.engine.info.vocab_size)
    mode, peers = server.model.mode, tuple[Rendezvous | None, ...]()
    if mode is not DisaggregationMode.NULL or context.sender.bootstrap or not body.model_fields_set.isdisjoint(FIELDS):
        peers = rendezvous_of(mode, server.cluster, context.sender, body, num_prompts * body.choices)
    if body.priority and not server.model.uses_priority:
        raise InvalidRequest(
            "no request goes before others on this server (--schedule-policy priority): leave priority out",
            code=UNSUPPORTED_FIELD,
            param="priority",
        )
    session, seed = body.session, server.sampling.seed if body.seed is None else body.seed
    has_receipt = False
    if body.receipt or context.tenant.name in server.config.receipt_tenants:
        has_receipt, seed = takes_receipt(body, num_prompts * body.choices), seed_of(seed)
    return Order(
        params=params,
        priority=body.priority,
        namespace=server.isolation.namespace(context.tenant, session),
        author=server.isolation.author(context.tenant, session),
        tenant=context.tenant.name,
        peers=peers,
        adapter=context.adapter,
        adapter_number=context.adapter_number,
        keep_token_ids=body.return_token_ids or has_receipt,
        seed=seed,
        receipt=partial(_receipt, server) if has_receipt else None,
        discard_output=body.wanted == 0,
    )


async def _serve(
    server: ServerContext,
    context: RequestContext,
    body: CompletionRequest | ChatRequest,
    dialect: Dialect,
    prompts: Callable[[], Awaitable[list[Prompt]]],
    requested: RequestedParams,
    *,
    known_as: str | None = None,
) -> Response:
    """Admit, tokenize, submit, and answer. A request that is refused before its first token gets the status of its
    error."""
    async with contextlib.AsyncExitStack() as undo:
        source, num_prompts = ("prompt", len(body.prompts)) if isinstance(body, CompletionRequest) else ("messages", 1)
        undo.enter_context(server.lifecycle.admit(context.tenant.name, num_prompts * body.choices))
        order = _order(server, context, body, requested.values, num_prompts)
        watch = context.client.watch
        for asked in body.grammars:
            await server.grammars.check(server.client, asked.grammar, asked.field)
        with naming(source):
            made = await prompts()
        if any((body.prompt_cache_retention, body.nvext)):
            made = [_keeping(prompt, body) for prompt in made]
        if watch.gone:
            raise ClientGone
        order = replace(order, params=await requested.complete(server, made, source))
        generation = Generation.submit(server.engine, server.table(body), made, order)
        generation.started_at = context.client.arrived_at
        made.clear()  # the engine has their pictures
        firsts = generation.choices[:: order.params.n]  # of each prompt
        first, session = generation.choices[0].prompt, f"{order.namespace} {order.author}"
        generation.why_differs = lru_cache(partial(server.answered.reason, session, first.token_ids))
        undo.callback(_count, server, context, generation)
        if first.reading is not None and any(body.session):
            undo.callback(_note_answer, server, session, generation)
        undo.callback(generation.abort)
        names = (context.request_id, known_as or body.request_id)
        undo.enter_context(server.under_way.known(context.tenant, names, generation.abort))
        watch.on_gone(generation.disconnect)
        if not body.stream:
            answer = Response(await collect(server, dialect, generation), media_type="application/json")
            context.note_cache(firsts, generation.num_prompt_tokens)
            return answer
        writer = EventWriter(context.connection, dialect, generation)
        generation.deliver(writer)
        await writer.begun()
        if generation.disconnected:
            raise ClientGone
        if generation.first_token_at is not None:  # otherwise a long silence began the stream
            context.note_cache(firsts, generation.num_prompt_tokens)
        return EventStream(context.send, writer, undo.pop_all())


def _receipt(server: ServerContext, order: Order, choice: Choice) -> Receipt:
    """Return the receipt of an answer's only choice."""
    adapter = server.engine.adapters.get(order.adapter)
    return receipt_of(
        environment=server.environment_of(choice.weight_version),
        weight_version=choice.weight_version,
        adapter="" if adapter is None else adapter.digest,
        prompt_ids=choice.prompt.token_ids,
        params=order.params_of(0, choice.prompt.grammar),
        seed=order.seed,
        output_ids=choice.token_ids,
    )


def _keeping(prompt: Prompt, body: ChatRequest | CompletionRequest) -> Prompt:
    """Return a prompt that is kept as a whole for as long as the client wants, besides its marks."""
    hinted = 0.0 if body.nvext is None else body.nvext.ttl_s
    ttl_s = max(RETENTION_S[body.prompt_cache_retention], hinted)
    if not ttl_s:
        return prompt
    return replace(prompt, retentions=(*prompt.retentions, RetentionRequest(len(prompt.token_ids), ttl_s)))


def _gained(reports: Sequence[SpeculationReport]) -> dict[str, float]:
    """Return the mean effect of speculative decoding."""
    return {
        "spec_net_speedup": sum(report.net_speedup for report in reports) / len(reports),
        "accepted_per_step": sum(report.accepted_per_step for report in reports) / len(reports),
    }


def _note_answer(server: ServerContext, session: str, generation: Generation) -> None:
    """Keep the kinds of tokens of a chat's first choice."""
    choice = generation.choices[0]
    reading = choice.prompt.reading
    opened = reading is not None and reading.opened
    server.answered.note(session, choice.prompt.token_ids, choice.runs, opened=opened)


def _count(server: ServerContext, context: RequestContext, generation: Generation) -> None:
    """One line and the metrics of an ended request."""
    now = time.monotonic()
    usage = generation.usage()
    server.metrics.count_generation(generation, usage, now, context.route, context.trace)
    first, last = generation.first_token_at, generation.last_token_at
    tokens = usage.completion_tokens
    rate = (tokens - 1) / (last - first) if first is not None and last is not None and last > first else 0.0
    reasons = ",".join(sorted({choice.finish or "abort" for choice in generation.choices}))
    finish = "disconnect" if generation.disconnected else reasons
    first_token_s = None if first is None else first - generation.started_at
    log.info(
        event(
            "finished",
            id=context.request_id,
            route=context.route,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cache.cached_tokens,
            output_tokens=tokens,
            ttft_ms="none" if first_token_s is None else first_token_s * 1e3,
            tok_s=rate,
            finish=finish,
            miss=usage.cache.miss_reason,
            **_details(context, generation, usage),
        )
    )
    if context.trace is not None:
        note_generation(server, context, context.trace, generation, usage)
    choice = generation.choices[0]
    server.ended[context.tenant.name].append(
        Ended(
            request_id=context.request_id,
            route=context.route,
            model=context.model,
            ended_at=time.time(),
            total_s=now - generation.started_at,
            first_token_s=first_token_s,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=tokens,
            finish=finish,
            error=generation.error.code if isinstance(generation.error, ForebayError) else None,
            differs=None if usage.cache.differs is None else usage.cache.differs["reason"],
            cache=choice.cache,
            memory=choice.memory,
            history=msgspec.structs.replace(choice.history, chunk_ends_s=[]),
        )
    )


def _details(context: RequestContext, generation: Generation, usage: Usage) -> dict[str, Any]:
    """Return what the line of an ended request has only if the request had it."""
    details: dict[str, Any] = {"adapter": context.adapter} if context.adapter else {}
    if reports := [choice.speculation for choice in generation.choices if choice.speculation is not None]:
        details |= _gained(reports)
    if context.trace is not None:
        details |= context.trace.ids
    if usage.cache.differs is not None:
        details["differs_at"] = usage.cache.differs["position"]
    if isinstance(generation.error, ForebayError):
        details["error"] = generation.error.code
    return details
