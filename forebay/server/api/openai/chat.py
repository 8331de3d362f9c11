"""/v1/chat/completions: messages, and the deltas of which they are made."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.engine.client.choice import Choice, Piece
from forebay.engine.client.scores import Scored
from forebay.http.route import EVENTS, Access, Forward, Route
from forebay.server.api.core.dialect import ChunkDialect, Fields, encode
from forebay.server.api.core.generation import Generation, Usage
from forebay.server.api.core.items import Call as ReadCall
from forebay.server.api.core.items import items_of
from forebay.server.api.core.logprobs import ChatLogprobs, RankedLogprob, chat_logprobs
from forebay.server.api.core.serving import check_counts, serve_chat
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import NO_OPTIONS, ChatRequest
from forebay.server.protocol.results import check_results
from forebay.server.protocol.tools import input_of
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct, kw_only=True):
    """The custom tool that a call names, and its input as plain text."""

    name: str
    input: str


class Call(msgspec.Struct, kw_only=True):
    """`function`, or `custom` for a tool that takes one text."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class Message(msgspec.Struct, kw_only=True):
    """An answer's message. `content` is null if the answer has calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions when it is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(kw_only=True)
class ChatDialect(ChunkDialect):
    """`text_tools` are the names of the tools that take one text."""

    addition = b"delta"
    event_object = "chat.completion.chunk"

    logprobs: bool
    text_tools: frozenset[str] = frozenset()
    _inputs: dict[tuple[int, int], list[str]] = field(default_factory=dict)  # of a stream, by choice and call

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choices = [
            ChatChoice(
                index=choice.index,
                message=Message(role="assistant", content=text, refusal=None)
                if choice.prompt.reading is None
                else message_of(parts[choice.index], self.text_tools),
                logprobs=self._scores(choice, tokens) if self.logprobs else None,
                finish_reason=cast(Any, choice.finish),
                token_ids=self.ids_of(choice),
            )
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        first = generation.choices[0]
        return encode(
            ChatCompletion(
                id=self.fields["id"],
                object="chat.completion",
                created=self.fields["created"],
                model=self.fields["model"],
                choices=choices,
                usage=generation.usage(),
                prompt_logprobs=self.prompt_scores_of(first),
                prompt_token_ids=self.prompt_ids_of(first),
            )
        )

    def opening(self, generation: Generation) -> bytes:
        if self.usage_of_each:
            self._running = generation
        first, *others = (self._event(choice, b'{"role":"assistant"}') for choice in generation.choices)
        if self.token_ids:
            ids = {"prompt_token_ids": generation.choices[0].prompt.token_ids}
            first = first.removesuffix(b"}\n\n") + b"," + encode(ids)[1:] + b"\n\n"
        return b"".join((first, *others))

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, delta_of(Said(text)))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        added = [delta for part in piece.parts if (delta := self._delta(choice, part))]
        if not added and (piece.text or piece.tokens):
            added.append(delta_of(Said(piece.text)))
        out = b""
        for number, delta in enumerate(added):
            scored = self.logprobs and number == 0
            scores = encode(self._scores(choice, piece.tokens)) if scored else b"null"
            out += self._event(choice, delta, scores)
        if piece.finish is not None:
            out += self._event(choice, b"{}", finish=encode(piece.finish))
        elif not out and self.has_new_ids(choice):
            out = self._event(choice, b"{}")
        return out

    def _delta(self, choice: Choice, part: Part) -> bytes:
        """The delta of a part. The text of a tool that takes one comes at once, behind its JSON."""
        match part:
            case CallBegun(call, name) if name in self.text_tools:
                self._inputs[choice.index, call] = []
                return _begun(call, _text_call(name, ""))
            case CallArguments(call, text) if (choice.index, call) in self._inputs:
                self._inputs[choice.index, call].append(text)
                return b""
            case CallEnded(call) if (choice.index, call) in self._inputs:
                text = input_of("".join(self._inputs.pop((choice.index, call))))
                return encode({"tool_calls": [{"index": call, "custom": {"input": text}}]})
        return delta_of(part)

    def _scores(self, choice: Choice, tokens: list[Scored]) -> ChatLogprobs:
        return chat_logprobs(self.table, tokens, read=choice.prompt.reading is not None)


def _call(name: str, arguments: str) -> Call:
    called = FunctionCall(name=name, arguments=arguments)
    return Call(id=f"call_{secrets.token_hex(12)}", type="function", function=called)


def _text_call(name: str, text: str) -> Call:
    called = CustomCall(name=name, input=text)
    return Call(id=f"call_{secrets.token_hex(12)}", type="custom", custom=called)


def _begun(number: int, call: Call) -> bytes:
    """Return the delta that begins a call."""
    return b'{"tool_calls":[{"index":%d,%b]}' % (number, encode(call)[1:])


def delta_of(part: Part) -> bytes:
    """Return a part as a stream's delta; a call's end has none."""
    match part:
        case Said(text):
            return b'{"content":%b}' % encode(text)
        case Thought(text):
            return b'{"reasoning_content":%b}' % encode(text)
        case CallArguments(call, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (call, encode(text))
        case CallBegun(call, name):
            return _begun(call, _call(name, ""))
        case _:
            return b""


def message_of(parts: list[Part], text_tools: frozenset[str] = frozenset()) -> Message:
    """A whole answer of which all parts are known."""
    items = items_of(parts)
    said = "".join(item.text for item in items if isinstance(item, Said))
    thought = "".join(item.text for item in items if isinstance(item, Thought))
    calls = [
        _text_call(item.name, input_of(item.arguments)) if item.name in text_tools else _call(item.name, item.arguments)
        for item in items
        if isinstance(item, ReadCall)
    ]
    return Message(
        role="assistant",
        content=said or (None if calls else ""),
        refusal=None,
        reasoning_content=thought or UNSET,
        tool_calls=calls or UNSET,
    )


async def chat_completions(request: Request, server: ServerContext) -> Response:
    """Answer a chat, whole or as a stream of chunks."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, ChatRequest)
    server.check_model(context, body.model)
    check_counts(server, body.choices, 1)
    if any(message.tool_calls or message.role == "tool" for message in body.messages):
        check_results(body.messages, unfinished=body.continue_final_message)
    options, now = body.stream_options or NO_OPTIONS, int(time.time())
    dialect = ChatDialect(
        fields=Fields(id=f"chatcmpl-{context.request_id}", object="", created=now, model=context.model),
        table=server.tokenizer.table,
        logprobs=bool(body.logprobs),
        text_tools=body.text_tools if body.tools else frozenset(),
        include_usage=options.include_usage,
        usage_of_each=options.continuous_usage_stats,
        num_prompt_top=body.prompt_logprobs,
        token_ids=body.return_token_ids,
    )
    num_top = (body.top_logprobs or 0) if body.logprobs else -1
    return await serve_chat(server, context, body, dialect, num_top=num_top)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        body=ChatRequest,
        answer=ChatCompletion,
        stream=EVENTS,
        text="Answer a conversation, in OpenAI's form.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
)
