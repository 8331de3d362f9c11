"""/v1/messages: Anthropic's messages, which are made of blocks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from forebay.base import json_text
from forebay.base.errors import ForebayError
from forebay.engine.client.choice import Choice
from forebay.engine.client.scores import Scored
from forebay.grammar.answers import can_limit_thinking
from forebay.http.errors import MESSAGES, error_ending
from forebay.http.route import EVENTS, Access, Forward, Route
from forebay.memory.miss_reason import MissReason
from forebay.server.api.anthropic.messages_request import (
    BILLING_HEADER,
    CountTokensRequest,
    MessagesRequest,
    behind_the_system_text,
)
from forebay.server.api.core.generation import CacheUsage, Generation
from forebay.server.api.core.images import chat_ids
from forebay.server.api.core.items import Call, Item, ItemsDialect, Kinds, items_of, parts_of, the_choice
from forebay.server.api.core.prompts import check_answerable, naming
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import serve_chat
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.cache_control import TTL_S
from forebay.server.protocol.requests import ChatRequest
from forebay.server.protocol.results import check_results
from forebay.text.answers.for_template import INVALID_JSON
from forebay.text.answers.parts import Part, Said, Thought

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingDetails(msgspec.Struct, kw_only=True):
    """The output tokens that were thinking."""

    thinking_tokens: int


class CacheCreation(msgspec.Struct, kw_only=True):
    """The tokens that a request leaves in the prefix cache, by how long its marks want them kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Each token of the prompt is in one of three numbers. `moved`: the parts of the system text that are behind it."""

    input_tokens: int
    cache_creation: CacheCreation
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    cache: CacheUsage
    moved: list[str] | UnsetType = UNSET


class AnthropicBlock(msgspec.Struct, kw_only=True):
    """`text`; `thinking` and `signature`; or `id`, `name` and `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The answer of /v1/messages; in a stream, the message that its first event opens."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopReason | None  # null where a stream begins
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


UNSIGNED: Final = "unsigned"  # clients drop thinking that has no signature; this one is never looked at
_DELTAS: Final = {
    "text": b'{"type":"text_delta","text":%b}',
    "thinking": b'{"type":"thinking_delta","thinking":%b}',
    "tool_use": b'{"type":"input_json_delta","partial_json":%b}',
}

_encode: Final = msgspec.json.Encoder().encode


@dataclass(kw_only=True)
class MessagesDialect(ItemsDialect):
    """`max_tokens` were asked for, for which the context may have had no room. With `marked` the client wants the
    prompt kept, which is done in pages of `page_size` tokens. `moved` goes into the usage."""

    kinds = Kinds(said="text", thought="thinking", called="tool_use")
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    answer_id: str
    model: str
    max_tokens: int
    page_size: int
    marked: bool = False
    shows_thinking: bool = True
    moved: list[str] | UnsetType = UNSET
    _index: int = -1  # of the last block that was begun
    _kind: str = ""  # of the one that is open

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choice = the_choice(generation)
        blocks = [self._block(item) for item in items_of(parts_of(choice, texts[0], parts[0]))]
        answer = self._message(generation, choice.num_tokens)
        answer.content, (answer.stop_reason, answer.stop_sequence) = blocks, self._end_of(choice)
        return _encode(answer)

    def opening(self, generation: Generation) -> bytes:
        return _event("message_start", {"message": self._message(generation, 0)})

    def closing(self, generation: Generation) -> bytes:
        try:
            choice = the_choice(generation)
        except ForebayError as error:
            return self.failure(error)
        reason, sequence = self._end_of(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        ending = {"delta": delta, "usage": self._usage(generation, choice.num_tokens)}
        return self._end() + _event("message_delta", ending) + _event("message_stop", {})

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, MESSAGES)

    def _call(self, name: str) -> bytes:
        return self._begin("tool_use", self._block(Call(name, "")))

    def _within(self, kind: str, text: str) -> bytes:
        before = b""
        if self._kind != kind:
            before = self._end() + self._begin(kind, self._block(Said("") if kind == "text" else Thought("")))
        if kind == "thinking" and not self.shows_thinking:
            return before
        return before + self._delta(_DELTAS[kind] % _encode(text))

    def _begin(self, kind: str, block: AnthropicBlock) -> bytes:
        self._kind, self._index = kind, self._index + 1
        if kind == "thinking":
            block.signature = ""
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _end(self) -> bytes:
        if not self._kind:
            return b""
        kind, self._kind = self._kind, ""
        signed = b'{"type":"signature_delta","signature":%b}' % _encode(UNSIGNED)
        before = self._delta(signed) if kind == "thinking" else b""
        return before + _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: bytes) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
            % (self._index, delta)
        )  # fmt: skip

    def _block(self, item: Item) -> AnthropicBlock:
        match item:
            case Said(text):
                return AnthropicBlock(type="text", text=text)
            case Thought(text):
                shown = text if self.shows_thinking else ""
                return AnthropicBlock(type="thinking", thinking=shown, signature=UNSIGNED)
            case Call(name, arguments):
                given = input_of(arguments)
                return AnthropicBlock(type="tool_use", id=f"toolu_{secrets.token_hex(12)}", name=name, input=given)

    def _message(self, generation: Generation, num_tokens: int) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.answer_id,
            type="message",
            role="assistant",
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(generation, num_tokens),
        )

    def _end_of(self, choice: Choice) -> tuple[StopReason, str | None]:
        if choice.finish == "length":
            full = choice.num_tokens < self.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        if choice.finish == "tool_calls":
            return "tool_use", None
        return "stop_sequence" if choice.stopped else "end_turn", choice.stopped

    def _usage(self, generation: Generation, num_tokens: int) -> AnthropicUsage:
        """Each token of the prompt is in one of three: read from the cache, left there for the next request where the
        client marks what it wants to have kept, or neither."""
        usage = generation.usage()
        prompt, cached, found = usage.prompt_tokens, usage.cache.cached_tokens, usage.cache.miss_reason
        is_cached = self.marked and found != MissReason.DISABLED
        created = max(0, prompt // self.page_size * self.page_size - cached) if is_cached else 0
        long = [asked.num_tokens for asked in generation.choices[0].prompt.retentions if asked.ttl_s > TTL_S["5m"]]
        for_long = min(created, max(0, max(long, default=0) // self.page_size * self.page_size - cached))
        details = usage.completion_tokens_details
        thinking = details.reasoning_tokens if num_tokens and details is not UNSET else 0
        return AnthropicUsage(
            input_tokens=prompt - cached - created,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=created - for_long, ephemeral_1h_input_tokens=for_long
            ),
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=num_tokens,
            output_tokens_details=ThinkingDetails(thinking_tokens=thinking),
            weight_version=usage.weight_version,
            adapter=usage.adapter,
            cache=usage.cache,
            moved=self.moved,
        )


def input_of(arguments: str) -> Any:
    """Return a call's arguments as an object: character by character as the model wrote them if they are complete; the
    complete members if they were cut off; an object with one key of its own if they are no JSON."""
    try:
        if isinstance(json_text.decode(arguments or "{}"), dict):
            return msgspec.Raw(arguments.encode() or b"{}")
        found = None
    except ValueError:
        found = _beginning_of(arguments)
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}


def _beginning_of(arguments: str) -> Any:
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return None


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


async def messages(request: Request, server: ServerContext) -> Response:
    """Answer a chat in Anthropic's format, whole or as a stream of events."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, MessagesRequest)
    server.check_model(context, body.model)
    with renamed(body.renamings):
        chat, moved = _settled(server, context, body)
    dialect = MessagesDialect(
        answer_id=f"msg_{context.request_id}",
        model=context.model,
        max_tokens=body.max_tokens,
        page_size=server.engine.info.page_size,
        marked=body.marked,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        moved=moved,
    )
    with renamed(body.renamings):
        return await serve_chat(server, context, chat, dialect, cut_to_room=True)


async def count_tokens(request: Request, server: ServerContext) -> Response:
    """Return how many tokens the messages have after the chat template. Nothing is generated."""
    body = await read_body(request, server, CountTokensRequest)
    context = RequestContext.of(request.scope)
    server.check_model(context, body.model)
    with renamed(body.renamings):
        chat, _ = _settled(server, context, body)
        check_answerable(chat, server.model.answers)
        with naming("messages"):
            token_ids = await chat_ids(server, context, chat.messages, chat)
    return Response(msgspec.json.encode(TokenCount(input_tokens=len(token_ids))), media_type="application/json")


def _settled(
    server: ServerContext, context: RequestContext, body: CountTokensRequest
) -> tuple[ChatRequest, list[str] | UnsetType]:
    """Return the chat of the body, and the parts of the system text that were moved. Clients send fields of thinking
    with every request: those that the template does not read are left out, and so is high effort, the default. A
    budget that cannot be enforced is ignored, as no client can leave it out."""
    found, update = server.model.answers, dict[str, Any]()
    if found.can_switch:
        update["enable_thinking"] = body.thinks
    limits = can_limit_thinking(found.formats, server.tokenizer.table)
    if body.chat.max_thinking_tokens is not None and not limits:
        update["max_thinking_tokens"] = None
        if found.formats.thinking is not None:
            context.note_ignored(["thinking.budget_tokens"])
    if body.chat.reasoning_effort == "high" and "reasoning_effort" not in found.variables:
        update["reasoning_effort"] = None
    check_results(body.chat.messages)
    chat = body.chat.model_copy(update=update)
    settled = chat if server.config.keep_volatile_headers else behind_the_system_text(chat)
    return settled, UNSET if settled is chat else [BILLING_HEADER.removesuffix(":")]


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        MESSAGES,
        messages,
        body=MessagesRequest,
        answer=AnthropicMessage,
        stream=EVENTS,
        text="Answer a conversation, in Anthropic's form.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        body=CountTokensRequest,
        answer=TokenCount,
        text="How many tokens the prompt of a message would have.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
