"""The routes that generate: /v1/completions, and in three dialects chats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError, InvalidRequest, RequestError
from forebay.base.log import event, get_logger
from forebay.engine.choice import Prompt
from forebay.requests.sampling_params import SamplingParams, check_token_ids
from forebay.server.answering.calling import check_answerable, reading_of
from forebay.server.answering.delivery import EventStream, EventWriter, collect
from forebay.server.answering.enforcing import enforced_grammar
from forebay.server.answering.generation import Generation
from forebay.server.answering.order import Order
from forebay.server.answering.rendezvous import rendezvous_of
from forebay.server.answering.wishes import params_of, with_room, with_words
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.dialects.chat import ChatDialect
from forebay.server.dialects.completion import CompletionDialect
from forebay.server.dialects.dialect import Dialect
from forebay.server.dialects.messages import MessagesDialect
from forebay.server.dialects.messages_request import (
    BILLING_HEADER,
    CountTokensRequest,
    MessagesRequest,
    behind_the_system_text,
)
from forebay.server.dialects.native import NativeDialect
from forebay.server.dialects.native_request import NativeRequest
from forebay.server.dialects.renaming import renamed
from forebay.server.http.bodies import ClientGone
from forebay.server.http.watch import Watch
from forebay.server.protocol.requests import ChatRequest, CompletionRequest, PlainText, Sampling
from forebay.server.protocol.validation import INVALID_COMBINATION, UNSUPPORTED_FIELD

log = get_logger("server")


async def chat_completions(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, ChatRequest)
    server.check_model(body.model)
    check_counts(server, body.choices, 1)
    dialect = ChatDialect(
        _fields(server, f"chatcmpl-{context.request_id}"),
        server.tokenizer.table,
        logprobs=bool(body.logprobs),
        text_tools=body.text_tools,
        include_usage=body.wants_usage,
        usage_of_each=body.wants_usage_of_each,
        num_prompt_top=body.prompt_logprobs,
        token_ids=body.return_token_ids,
    )
    num_top = (body.top_logprobs or 0) if body.logprobs else -1
    return await serve_chat(server, context, body, dialect, num_top=num_top)


async def messages(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, MessagesRequest)
    server.check_model(body.model)
    chat, remarks = _settled(server, body)
    dialect = MessagesDialect(
        answer_id=f"msg_{context.request_id}",
        model=server.model.name,
        max_tokens=body.max_tokens,
        page_size=server.engine.info.page_size,
        marked=body.marked,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        remarks=remarks,
    )
    with renamed(body.renamings):
        return await serve_chat(server, context, chat, dialect, cut_to_room=True)


async def count_tokens(request: Request, server: ServerContext) -> Response:
    body = await read_body(request, server, CountTokensRequest)
    server.check_model(body.model)
    with renamed(body.renamings):
        chat, _ = _settled(server, body)
        check_answerable(chat, server.model.answers)
        with naming("messages"):
            token_ids = await server.render(server.tokenizer.encode_chat, chat.messages, chat)
    return Response(msgspec.json.encode({"input_tokens": len(token_ids)}), media_type="application/json")


def _settled(server: ServerContext, body: CountTokensRequest) -> tuple[ChatRequest, dict[str, Any]]:
    """The chat that the body stands for, and what has to be said about it. Clients speak of thinking with every
    request: a model that cannot be told is not, and high effort is what who is told nothing makes."""
    remarks: dict[str, Any] = {}
    found, told = server.model.answers, dict[str, Any]()
    if found.can_switch:
        told["enable_thinking"] = body.thinks
    if found.formats.thinking is None:
        told["max_thinking_tokens"] = None
    if body.chat.reasoning_effort == "high" and "reasoning_effort" not in found.variables:
        told["reasoning_effort"] = None
    chat = body.chat.model_copy(update=told)
    settled = chat if server.config.keep_volatile_headers else behind_the_system_text(chat)
    if settled is not chat:
        remarks["moved"] = [BILLING_HEADER.removesuffix(":")]
    return settled, remarks


async def serve_chat(
    server: ServerContext,
    context: RequestContext,
    body: ChatRequest,
    dialect: Dialect,
    *,
    num_top: int = -1,
    cut_to_room: bool = False,
) -> Response:
    check_answerable(body, server.model.answers)
    if body.verbosity is not None and "verbosity" not in server.model.answers.variables:
        context.note_ignored(("verbosity",))

    async def prompts() -> list[Prompt]:
        if not server.engine.info.wants_resume_points:
            prompt = Prompt(token_ids=await server.render(server.tokenizer.encode_chat, body.messages, body))
        else:
            encode = server.tokenizer.encode_chat_prompt
            found = await server.render(encode, body.messages, body, breakpoints=body.breakpoints)
            prompt = Prompt(token_ids=found.token_ids, resume_points=tuple(found.resume_points))
        reading = reading_of(body, server.model.answers, server.tokenizer, prompt.token_ids)
        if reading is not None and not body.skip_special_tokens:
            what = "skip_special_tokens=false: the answer is read for thinking and calls, leave it out"
            raise InvalidRequest(what, code=INVALID_COMBINATION, param="skip_special_tokens")
        return [replace(prompt, reading=reading, grammar=await enforced_grammar(server, body, prompt.token_ids))]

    of_prompt = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    params = params_of(server, body, num_top=num_top, prompt_logprobs=of_prompt)
    return await _serve(server, context, body, dialect, prompts, params, body.wanted, cut_to_room=cut_to_room)


async def completions(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, CompletionRequest)
    server.check_model(body.model)
    check_counts(server, body.choices, len(body.prompts))
    dialect = CompletionDialect(
        _fields(server, f"cmpl-{context.request_id}"),
        server.table(body),
        num_top=body.logprobs,
        echo=bool(body.echo),
        include_usage=body.wants_usage,
        usage_of_each=body.wants_usage_of_each,
        num_prompt_top=body.prompt_logprobs,
        token_ids=body.return_token_ids,
    )
    return await serve_completion(server, context, body, dialect)


async def native(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, NativeRequest)
    completion, num_top = body.completion, body.top_logprobs_num if body.return_logprob else None
    with renamed(body.renamings):
        check_counts(server, completion.choices, len(completion.prompts))
        dialect = NativeDialect(
            body.rid or context.request_id,
            server.table(completion),
            num_top=num_top,
            names=body.return_text_in_logprobs,
            many=body.has_many,
        )
        return await serve_completion(server, context, completion, dialect, known_as=body.rid)


async def serve_completion(
    server: ServerContext,
    context: RequestContext,
    body: CompletionRequest,
    dialect: Dialect,
    *,
    known_as: str | None = None,
    cut_to_room: bool = False,
) -> Response:
    num_top, of_prompt = (-1 if asked is None else asked for asked in (body.logprobs, body.prompt_logprobs))
    params = params_of(server, body, num_top=num_top, prompt_logprobs=max(num_top if body.echo else -1, of_prompt))

    async def prompts() -> list[Prompt]:
        return [
            Prompt(
                token_ids=await prompt_ids(server, body, prompt, "prompt"),
                text=prompt if isinstance(prompt, str) else None,
            )
            for prompt in body.prompts
        ]

    return await _serve(
        server, context, body, dialect, prompts, params, body.wanted, cut_to_room=cut_to_room, known_as=known_as
    )


async def prompt_ids(server: ServerContext, body: PlainText, prompt: str | list[int], field: str) -> list[int]:
    """Return the token ids of a text, or check those that were sent in `field`."""
    if isinstance(prompt, str):
        return await server.encode(prompt, body)
    info = server.engine.info
    if len(prompt) <= info.context_length:  # a longer one is refused for that
        check_token_ids(field, prompt, info.vocab_size)
    return prompt


def _fields(server: ServerContext, answer_id: str) -> dict[str, Any]:
    """`object`, which is second, is for the dialect to say."""
    return {"id": answer_id, "object": "", "created": int(time.time()), "model": server.model.name}


def check_counts(server: ServerContext, n: int, num_prompts: int) -> None:
    config = server.config
    if n > config.max_n:
        raise InvalidRequest(f"n is {n}; at most {config.max_n} choices are made (--max-n)", param="n")
    if num_prompts > config.max_prompts:
        raise InvalidRequest(
            f"there are {num_prompts} prompts; at most {config.max_prompts} are taken (--max-prompts)", param="prompt"
        )


def _order(
    server: ServerContext, context: RequestContext, body: Sampling, params: SamplingParams, num_prompts: int
) -> Order:
    """Checked against the vocabulary, and against what the engine looks at."""
    params.of_tokens().check(server.engine.info.vocab_size)
    halves = rendezvous_of(server.model.mode, server.cluster, context.sender, body, num_prompts * body.choices)
    if body.priority and not server.model.uses_priority:
        raise InvalidRequest(
            "no request goes before others on this server (--schedule-policy priority): leave priority out",
            code=UNSUPPORTED_FIELD,
            param="priority",
        )
    return Order(
        params=params,
        priority=body.priority,
        namespace=server.isolation.namespace(context.tenant, body.session),
        author=server.isolation.author(context.tenant, body.session),
        tenant=context.tenant.name,
        halves=halves,
        keep_token_ids=body.return_token_ids,
        seed=server.sampling.seed if body.seed is None else body.seed,
    )


async def _serve(
    server: ServerContext,
    context: RequestContext,
    body: Sampling,
    dialect: Dialect,
    prompts: Callable[[], Awaitable[list[Prompt]]],
    params: SamplingParams,
    wanted: int | None,
    *,
    cut_to_room: bool = False,
    known_as: str | None = None,
) -> Response:
    """Admit, tokenize, submit, and answer. Whatever is refused before the first token has its own status."""
    async with contextlib.AsyncExitStack() as undo:
        info = server.engine.info
        source, num_prompts = ("prompt", len(body.prompts)) if isinstance(body, CompletionRequest) else ("messages", 1)
        undo.enter_context(server.lifecycle.admit(context.tenant.name, num_prompts * body.choices))
        order = _order(server, context, body, params, num_prompts)
        watch = undo.enter_context(Watch(context.receive))
        for asked in body.grammars:
            await server.grammars.check(asked.grammar, asked.field)
        with naming(source):
            made = await prompts()
        if watch.gone:
            raise ClientGone
        with naming("bad_words"):
            params = await with_words(server, params, body.bad_words or [])
        with naming(source):
            params = with_room(params, made, wanted, info, cut=cut_to_room)
        order = replace(order, params=params, discard_output=wanted == 0)
        generation = Generation.submit(server.engine, server.table(body), made, order)
        generation.started_at = context.arrived_at
        undo.callback(_count, server, context, generation)
        undo.callback(generation.abort)
        names = (context.request_id, known_as or body.request_id)
        undo.enter_context(server.under_way.known(context.tenant, names, generation.abort))
        watch.on_gone(generation.disconnect)
        if not body.stream:
            return Response(await collect(server, dialect, generation), media_type="application/json")
        writer = EventWriter(context.connection, dialect, generation)
        generation.deliver(writer)
        await generation.begun()
        if generation.disconnected:
            raise ClientGone
        return EventStream(context.send, writer, undo.pop_all())


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Errors from below the protocol, where texts have no field, get it as their param."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or field
        raise


def _gained(generation: Generation) -> dict[str, float]:
    """Return the effect of speculative decoding on the choices, on average."""
    reports = [choice.speculation for choice in generation.choices if choice.speculation is not None]
    if not reports:
        return {}
    return {
        "spec_net_speedup": sum(report.net_speedup for report in reports) / len(reports),
        "accepted_per_step": sum(report.accepted_per_step for report in reports) / len(reports),
    }


def _count(server: ServerContext, context: RequestContext, generation: Generation) -> None:
    """One line and the metrics of an ended request."""
    now = time.monotonic()
    server.metrics.count_generation(generation, now, context.route)
    usage = generation.usage()
    first, last = generation.first_token_at, generation.last_token_at
    tokens = usage["completion_tokens"]
    rate = (tokens - 1) / (last - first) if first is not None and last is not None and last > first else 0.0
    differs = usage["cache"]["differs"]
    reasons = ",".join(sorted({choice.finish or "abort" for choice in generation.choices}))
    log.info(
        event(
            "finished",
            id=context.request_id,
            route=context.route,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["cache"]["cached_tokens"],
            output_tokens=tokens,
            ttft_ms=(first - generation.started_at) * 1e3 if first is not None else "none",
            tok_s=rate,
            finish="disconnect" if generation.disconnected else reasons,
            miss=usage["cache"]["miss_reason"],
            **_gained(generation),
            **({"differs_at": differs["position"]} if differs is not None else {}),
            **({"error": generation.error.code} if isinstance(generation.error, ForebayError) else {}),
        )
    )
