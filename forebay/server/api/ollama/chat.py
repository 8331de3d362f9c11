"""Ollama's /api/chat and /api/generate. Answers are lines of JSON; the last has the counts and durations, in
nanoseconds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal, NotRequired, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.engine.client.choice import Choice, Piece
from forebay.engine.client.scores import Scored
from forebay.http.errors import OLLAMA, error_ending
from forebay.http.route import LINES, Access, Forward, Route
from forebay.server.api.anthropic.messages import input_of
from forebay.server.api.core.dialect import Dialect
from forebay.server.api.core.generation import Generation, Timings
from forebay.server.api.core.items import Call, items_of, parts_of, the_choice
from forebay.server.api.core.logprobs import chat_logprobs
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import serve_chat, serve_completion
from forebay.server.api.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import CompletionRequest
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought
from forebay.text.token_bytes import TokenBytes


class OllamaFunction(TypedDict):
    """A function that was called; the arguments are an object."""

    name: str
    arguments: dict[str, Any]


class OllamaCalled(TypedDict):
    """A call of an answer."""

    function: OllamaFunction


class OllamaSaid(TypedDict):
    """The message of an answer, or of one line of a stream."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCalled]]


class OllamaAnswer(TypedDict):
    """Counts and durations are in the last line of a stream; a request that generates nothing has none."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    adapter: NotRequired[str]  # the LoRA adapter that was applied
    logprobs: NotRequired[list[dict[str, Any]]]


class OllamaChat(OllamaAnswer):
    """The answer of /api/chat; of a stream, one line."""

    message: OllamaSaid


class OllamaGenerated(OllamaAnswer):
    """The answer of /api/generate; of a stream, one line."""

    response: str
    thinking: NotRequired[str]


_encode: Final = msgspec.json.Encoder().encode
_NS: Final = 1_000_000_000


def now() -> str:
    """Return the current time in UTC as ISO 8601 with a Z."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaDialect(Dialect):
    """`model` is the name in the request. A tool call is sent when it is complete."""

    media_type: ClassVar[str] = "application/x-ndjson"
    keep_alive: ClassVar[bytes] = b""  # each line is an answer: clients take none without its fields

    def __init__(self, table: TokenBytes, *, model: str, logprobs: bool) -> None:
        self._table = table
        self._logprobs = logprobs
        self._head = {"model": model, "created_at": now()}
        self._before = _encode(self._head)[:-1]
        self._call: list[CallBegun | CallArguments] = []  # the parts of the incomplete one

    @abstractmethod
    def content(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields that hold what the model wrote."""

    def loaded(self) -> bytes:
        """Return the answer to a request that generates nothing."""
        return _encode({**self._head, **self.content("", "", ()), "done": True, "done_reason": "load"})

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choice = the_choice(generation)
        items = items_of(parts_of(choice, texts[0], parts[0]))
        text = "".join(item.text for item in items if isinstance(item, Said))
        thought = "".join(item.text for item in items if isinstance(item, Thought))
        calls = [_called(item.name, item.arguments) for item in items if isinstance(item, Call)]
        fields = {**self.content(text, thought, calls), **self._scores(choice, scores[0])}
        return _encode({**self._head, **fields, **_ending(generation, choice)})

    def opening(self, generation: Generation) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._line(self.content(text, "", ()))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        fields = [fields for part in parts_of(choice, piece.text, piece.parts) if (fields := self._part(part))]
        scores = self._scores(choice, piece.tokens) if piece.tokens else {}
        if scores:
            fields[:1] = [{**(fields[0] if fields else self.content("", "", ())), **scores}]
        return b"".join(map(self._line, fields))

    def closing(self, generation: Generation) -> bytes:
        try:
            choice = the_choice(generation)
        except ForebayError as error:
            return self.failure(error)
        return _encode({**self._head, **self.content("", "", ()), **_ending(generation, choice)}) + b"\n"

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, OLLAMA)

    def _line(self, fields: dict[str, Any]) -> bytes:
        return b'%b,%b,"done":false}\n' % (self._before, _encode(fields)[1:-1])

    def _part(self, part: Part) -> dict[str, Any]:
        match part:
            case Said(text):
                return self.content(text, "", ())
            case Thought(text):
                return self.content("", text, ())
            case CallEnded():
                (call,) = items_of(self._call)
                self._call = []
                return self.content("", "", [_called(call.name, call.arguments)]) if isinstance(call, Call) else {}
            case _:
                self._call.append(part)
                return {}

    def _scores(self, choice: Choice, tokens: list[Scored]) -> dict[str, Any]:
        if not self._logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._table, tokens, read=choice.prompt.reading is not None).content}


class OllamaChatDialect(OllamaDialect):
    """The lines of /api/chat: each has a message."""

    def content(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        called = {"tool_calls": list(calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}


class OllamaGenerateDialect(OllamaDialect):
    """The lines of /api/generate: each has a text."""

    def content(self, text: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thought} if thought else {})}


def _called(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": input_of(arguments)}}


def _ending(generation: Generation, choice: Choice) -> dict[str, Any]:
    timings = Timings.of(generation)
    return {
        "done": True,
        "done_reason": "length" if choice.finish == "length" else "stop",
        "total_duration": round(timings.total_s * _NS),
        "load_duration": 0,
        "prompt_eval_count": len(choice.prompt.token_ids),
        "prompt_eval_duration": round(timings.prompt_s * _NS),
        "eval_count": choice.num_tokens,
        "eval_duration": round(timings.decode_s * _NS),
        **({"adapter": generation.adapter} if generation.adapter else {}),
    }


async def ollama_chat(request: Request, server: ServerContext) -> Response:
    """Answer Ollama's /api/chat. A request without messages loads the model, which is loaded already."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, OllamaChatRequest)
    server.check_model(context, body.model_name)
    dialect = OllamaChatDialect(server.tokenizer.table, model=body.model, logprobs=bool(body.logprobs))
    if body.chat is None:
        return Response(dialect.loaded(), media_type="application/json")
    with renamed(body.own_names):
        return await serve_chat(server, context, body.chat, dialect, num_top=body.num_top, cut_to_room=True)


async def ollama_generate(request: Request, server: ServerContext) -> Response:
    """Answer Ollama's /api/generate: a raw prompt, or one that the chat template wraps. An empty prompt loads the
    model."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, OllamaGenerateRequest)
    server.check_model(context, body.model_name)
    dialect = OllamaGenerateDialect(server.tokenizer.table, model=body.model, logprobs=bool(body.logprobs))
    if body.asked is None:
        return Response(dialect.loaded(), media_type="application/json")
    with renamed(body.own_names):
        if isinstance(body.asked, CompletionRequest):
            return await serve_completion(server, context, body.asked, dialect, cut_to_room=True)
        return await serve_chat(server, context, body.asked, dialect, num_top=body.num_top, cut_to_room=True)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/api/chat",
        ollama_chat,
        body=OllamaChatRequest,
        answer=OllamaChat,
        stream=LINES,
        text="Answer a conversation, in Ollama's form; streams unless `stream` is false.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama_generate,
        body=OllamaGenerateRequest,
        answer=OllamaGenerated,
        stream=LINES,
        text="Answer a prompt, in Ollama's form; streams unless `stream` is false.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
)
