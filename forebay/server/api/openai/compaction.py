"""Compaction: the served model sums up a conversation, and the client keeps the summary as a sealed item.

A request for it ends with the item `compaction_trigger` (Codex), or goes to /v1/responses/compact. An item of the input
that holds a summary replaces all that the model and its tools have said before it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import EngineError, ForebayError, InvalidRequest
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.choice import Choice
from forebay.engine.client.scores import Scored
from forebay.http.errors import RESPONSES
from forebay.http.route import Access, Forward, Route
from forebay.http.security import Tenant
from forebay.server.api.core.generation import Generation
from forebay.server.api.core.images import chat_ids
from forebay.server.api.core.items import items_of, parts_of, the_choice
from forebay.server.api.core.prompts import naming
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import serve_chat
from forebay.server.api.openai.responses_dialect import ResponsesDialect, ResponseUsage
from forebay.server.api.openai.responses_items import (
    CompactionItem,
    CompactionTrigger,
    Item,
    MessageItem,
    read,
    tools_alone,
    written,
)
from forebay.server.api.openai.responses_request import TRIGGER, CompactRequest, InputTokensRequest, ResponsesRequest
from forebay.server.api.openai.seals import Seals
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import ChatRequest
from forebay.server.protocol.results import check_results
from forebay.server.protocol.validation import UNSUPPORTED_FIELD
from forebay.text.answers.parts import Part, Said

MAX_SUMMARY_TOKENS: Final = 8192
MAX_RETAINED_CHARS: Final = 1 << 18  # of the user's messages beside the summary, the last ones


class Compacted(TypedDict):
    """The answer of /v1/responses/compact. `output` is the input of the next request: messages of the user, and the
    compaction."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class _Summary(msgspec.Struct):
    """The content of a seal."""

    summary: str


@dataclass(kw_only=True)
class CompactionDialect(ResponsesDialect):
    """A response whose only item is the compaction: the text of the answer, sealed."""

    seal: Callable[[str], str]
    _said: list[str] = field(default_factory=list)

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choice = the_choice(generation)
        for part in items_of(parts_of(choice, texts[0], parts[0])):
            if isinstance(part, Said):
                self._said.append(part.text)
        self._item()
        return msgspec.json.encode(self._ended(generation, choice))

    def text(self, choice: Choice, text: str) -> bytes:
        self._said.append(text)
        return b""

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Said):
            self._said.append(part.text)
        return b""

    def closing(self, generation: Generation) -> bytes:
        try:
            choice = the_choice(generation)
            item = self._item()
        except ForebayError as error:
            return self.failure(error)
        return self._whole_item(0, item) + self._event(
            "response.completed", {"response": self._ended(generation, choice)}
        )

    def _item(self) -> dict[str, Any]:
        summary = "".join(self._said).strip()
        if not summary:
            what = "the model wrote no summary of the conversation: compact it at the client, or send it again"
            raise EngineError(what, code="compaction_failed")
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": self.seal(summary)}
        self._written = [item]
        return item

    def _ended(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        """A summary that was cut off at its limit is one, too."""
        return self._finished(generation)


@dataclass(kw_only=True)
class CompactDialect(CompactionDialect):
    """The answer of /v1/responses/compact, with the messages that stay."""

    retained: Sequence[dict[str, Any]] = ()

    def _ended(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        ended = self._finished(generation)
        return {**self.fields, "output": [*self.retained, *ended["output"]], "usage": ended["usage"]}


def sealing(seals: Seals, tenant: Tenant) -> Callable[[str], str]:
    """Return what makes a summary's `encrypted_content`. Raises HttpError 501 if nothing can be sealed."""
    seals.check_available()
    return lambda summary: seals.seal(tenant, msgspec.json.encode(_Summary(summary)), time.time())


def is_triggered(items: Sequence[Item]) -> bool:
    """Return whether the answer is a compaction of the conversation."""
    return isinstance(items[-1], CompactionTrigger)


def expanded(seals: Seals, tenant: Tenant, items: Sequence[Item]) -> list[Item]:
    """Return the items with their summaries. Before the last one only messages of the user and of the system stay, and
    tools. Raises InvalidRequest that names an item which cannot be opened, and HttpError 501."""
    last = max((place for place, item in enumerate(items) if isinstance(item, CompactionItem)), default=-1)
    stays = (item if place >= last or _is_asked(item) else tools_alone(item) for place, item in enumerate(items))
    kept = [item for item in stays if item is not None]
    return [_opened(seals, tenant, item) if isinstance(item, CompactionItem) else item for item in kept]


def _is_asked(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role != "assistant"


def _opened(seals: Seals, tenant: Tenant, item: CompactionItem) -> CompactionItem:
    try:
        content = seals.opened(tenant, item.encrypted_content, time.time())
    except InvalidRequest as error:
        what = f"input has a compaction whose encrypted_content cannot be used: {error.message}"
        raise InvalidRequest(what, code=error.code, param="input") from None
    return item.with_summary(msgspec.json.decode(content, type=_Summary).summary)


def retained(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the last messages of the user, in their order, as long as they have `MAX_RETAINED_CHARS` together."""
    kept: list[dict[str, Any]] = []
    num_chars = 0
    for item in reversed(written([item for item in items if isinstance(item, MessageItem) and item.role == "user"])):
        num_chars += len(str(item["content"]))
        if num_chars > MAX_RETAINED_CHARS:
            break
        parts = item["content"]
        texts = [{"type": "input_text", "text": parts}] if isinstance(parts, str) else parts
        kept.append({**item, "id": f"msg_{secrets.token_hex(12)}", "status": "completed", "content": texts})
    return kept[::-1]


def for_summary(chat: ChatRequest) -> ChatRequest:
    """Return the chat of a compaction. Its tools stay in the prompt, so that the cached conversation is a prefix of it,
    and its text has `MAX_SUMMARY_TOKENS` at most."""
    most = min(MAX_SUMMARY_TOKENS, chat.wanted or MAX_SUMMARY_TOKENS)
    return chat.model_copy(update={"max_completion_tokens": most, "tool_choice": None})


def conversation(
    server: ServerContext, context: RequestContext, body: InputTokensRequest
) -> tuple[ChatRequest, list[Item]]:
    """Return the chat that a body stands for, and all its items, with those of the stored response before it."""
    items = list(body.items)
    chat = body.chat
    if body.previous_response_id is not None:
        stored = server.responses.get(context.tenant, body.previous_response_id, param="previous_response_id")
        if msgspec.json.decode(stored.response).get("status") == "in_progress":
            what = "previous_response_id names a response that is being made: wait until its status is another one"
            raise InvalidRequest(what, code="response_in_progress", param="previous_response_id")
        items[:0] = read(msgspec.json.decode(stored.items))
    if any(isinstance(item, CompactionItem) for item in items) or len(items) > len(body.items):
        chat = body.chat_of(expanded(server.seals, context.tenant, items))
    with renamed(body.renamings):
        check_results(chat.messages)
    return chat, items


async def compacted_beyond(
    server: ServerContext, context: RequestContext, body: ResponsesRequest, chat: ChatRequest, items: Sequence[Item]
) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """Return the chat, and no item, if its prompt has no more tokens than `context_management` allows. Otherwise
    return the chat with a summary in its place, and the item of the summary."""
    if not body.context_management:
        return chat, []
    most = body.context_management[0].compact_threshold or server.engine.info.context_length * 7 // 8
    if server.model.mode is not DisaggregationMode.NULL:
        what = "context_management needs two answers, and a pair of servers makes one: ask /v1/responses/compact first"
        raise InvalidRequest(what, code=UNSUPPORTED_FIELD, param="context_management")
    with naming("messages"):
        prompt = await chat_ids(server, context, chat.messages, chat)
    if len(prompt) <= most:
        return chat, []
    triggered = body.chat_of(expanded(server.seals, context.tenant, [*items, TRIGGER]))
    dialect = CompactionDialect(fields={}, seal=sealing(server.seals, context.tenant))
    summed = for_summary(triggered).model_copy(update={"stream": False})
    answer = await serve_chat(server, context, summed, dialect, cut_to_room=True)
    (item,) = msgspec.json.decode(answer.body)["output"]
    return body.chat_of(expanded(server.seals, context.tenant, [*items, *read([item])])), [item]


async def compact(request: Request, server: ServerContext) -> Response:
    """Answer with a shorter conversation that stands for the given one."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, CompactRequest)
    server.check_model(context, body.model)
    chat, items = conversation(server, context, body)
    dialect = CompactDialect(
        fields={"id": f"resp_{context.request_id}", "object": "response.compaction", "created_at": int(time.time())},
        seal=sealing(server.seals, context.tenant),
        retained=retained(items),
    )
    with renamed(body.renamings):
        return await serve_chat(server, context, for_summary(chat), dialect, cut_to_room=True)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        f"{RESPONSES}/compact",
        compact,
        body=CompactRequest,
        answer=Compacted,
        text="Sum up a conversation, as the input of the next response.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
)
