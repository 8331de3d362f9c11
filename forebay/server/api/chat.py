"""/v1/chat/completions: messages, and the deltas of which they are made."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forebay.engine.choice import Choice, Piece
from forebay.engine.scores import Scored
from forebay.server.api.dialect import ChunkDialect, encode
from forebay.server.api.generation import Generation
from forebay.server.api.items import Call, items_of
from forebay.server.api.logprobs import chat_logprobs
from forebay.server.api.serving import check_counts, serve_chat
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import NO_OPTIONS, ChatRequest
from forebay.server.protocol.tools import input_of
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought


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
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None}
                if choice.prompt.reading is None
                else message_of(parts[choice.index], self.text_tools),
                "logprobs": self._scores(choice, tokens) if self.logprobs else None,
                "finish_reason": choice.finish,
                **self.ids_of(choice),
            }
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        first = generation.choices[0]
        of_prompt = {**self.of_prompt(first), **self.prompt_ids_of(first)}
        return encode(
            {**self.fields, "object": "chat.completion", "choices": choices, "usage": generation.usage(), **of_prompt}
        )

    def opening(self, generation: Generation) -> bytes:
        if self.usage_of_each:
            self._running = generation
        first, *others = (self._event(choice, b'{"role":"assistant"}') for choice in generation.choices)
        if self.token_ids:
            ids = self.prompt_ids_of(generation.choices[0])
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
                return encode({"tool_calls": [{"index": call, **_text_call(name, "")}]})
            case CallArguments(call, text) if (choice.index, call) in self._inputs:
                self._inputs[choice.index, call].append(text)
                return b""
            case CallEnded(call) if (choice.index, call) in self._inputs:
                text = input_of("".join(self._inputs.pop((choice.index, call))))
                return encode({"tool_calls": [{"index": call, "custom": {"input": text}}]})
        return delta_of(part)

    def _scores(self, choice: Choice, tokens: list[Scored]) -> dict[str, Any]:
        return chat_logprobs(self.table, tokens, read=choice.prompt.reading is not None)


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _text_call(name: str, text: str) -> dict[str, Any]:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "custom", "custom": {"name": name, "input": text}}


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
            return encode({"tool_calls": [{"index": call, **_call(name, "")}]})
        case _:
            return b""


def message_of(parts: list[Part], text_tools: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A whole answer of which all parts are known."""
    items = items_of(parts)
    said = "".join(item.text for item in items if isinstance(item, Said))
    thought = "".join(item.text for item in items if isinstance(item, Thought))
    calls = [
        _text_call(item.name, input_of(item.arguments)) if item.name in text_tools else _call(item.name, item.arguments)
        for item in items
        if isinstance(item, Call)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


async def chat_completions(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, ChatRequest)
    server.check_model(body.model)
    check_counts(server, body.choices, 1)
    options, now = body.stream_options or NO_OPTIONS, int(time.time())
    dialect = ChatDialect(
        fields={"id": f"chatcmpl-{context.request_id}", "object": "", "created": now, "model": server.model.name},
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
