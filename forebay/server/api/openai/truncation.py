"""`truncation: auto` of /v1/responses: a conversation that does not fit the context loses its oldest items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forebay.base.errors import RequestError
from forebay.server.api.core.images import chat_ids
from forebay.server.api.core.prompts import check_answerable
from forebay.server.api.openai.responses_items import CALLS, OUTPUTS, Item, MessageItem, tools_alone
from forebay.server.api.openai.responses_request import InputTokensRequest
from forebay.server.context import RequestContext, ServerContext
from forebay.server.protocol.requests import ChatRequest


async def truncated(
    server: ServerContext, context: RequestContext, body: InputTokensRequest, chat: ChatRequest, items: Sequence[Item]
) -> ChatRequest:
    """Return the chat of the most items from the end whose prompt leaves room for the answer; `chat` itself if it fits,
    if the body asks for no truncation, or if not even the last item fits."""
    if body.truncation != "auto":
        return chat
    check_answerable(chat, server.model.answers)
    length = server.engine.info.context_length
    room = length - min(chat.wanted or length // 8, length // 2)

    async def fits(candidate: ChatRequest) -> bool:
        try:
            return len(await chat_ids(server, context, candidate.messages, candidate)) <= room
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    if await fits(chat):
        return chat
    fewest, most = 1, len(items)  # items that are dropped; none but the last one is kept if `most` is reached
    while fewest < most:
        middle = (fewest + most) // 2
        if await fits(body.chat_of(without(items, middle))):
            most = middle
        else:
            fewest = middle + 1
    return body.chat_of(without(items, fewest)) if fewest < len(items) else chat


def without(items: Sequence[Item], num_dropped: int) -> list[Item]:
    """Return the items without the first ones, of which messages of the system and tools stay, and the user's last one
    if no other is left. Results whose calls are dropped are dropped with them."""
    first, last = items[:num_dropped], items[num_dropped:]
    asked = [place for place, item in enumerate(items) if _is_of(item, "user")][-1:]
    stays: Iterator[Item | None] = (item if i in asked else _lasting(item) for i, item in enumerate(first))
    kept: list[Item] = [item for item in stays if item is not None]
    dropped = {item.call_id for item in first if isinstance(item, CALLS)}
    return kept + [item for item in last if not (isinstance(item, OUTPUTS) and item.call_id in dropped)]


def _lasting(item: Item) -> Item | None:
    """Return what of a dropped item stays: messages of the system, and tools."""
    return item if _is_of(item, "system", "developer") else tools_alone(item)


def _is_of(item: Item, *roles: str) -> bool:
    return isinstance(item, MessageItem) and item.role in roles
