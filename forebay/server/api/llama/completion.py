"""The routes of llama-server's clients: texts with counts, settings and timings. The last event of a stream holds
everything but the text."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal, NotRequired, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.base.sampling import NUMBERS
from forebay.engine.client.choice import Choice, Piece
from forebay.engine.client.scores import Scored
from forebay.http.errors import error_ending
from forebay.http.route import EVENTS, Access, Forward, Route
from forebay.requests.sampling_params import SamplingParams
from forebay.server.api.core.dialect import Dialect
from forebay.server.api.core.generation import Generation, Timings
from forebay.server.api.core.prompts import check_answerable, naming, render
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import RequestedParams, check_counts, serve_completion
from forebay.server.api.llama.request import LlamaCompletionRequest
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import ChatRequest
from forebay.text.answers.parts import Part
from forebay.text.token_bytes import TokenBytes


class LlamaTimings(TypedDict):
    """The durations of a completion, in milliseconds, and tokens per second, of prompt and prediction."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class LlamaToken(TypedDict):
    """A generated token with its log-probability and the most likely alternatives."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: NotRequired[list[dict[str, Any]]]


class LlamaCompletion(TypedDict):
    """The answer of llama-server's /completion; of a stream, the last event."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[LlamaToken]]
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["eos", "word", "limit", "none"]
    stopping_word: str
    tokens_cached: int
    timings: NotRequired[LlamaTimings]


class TemplateText(TypedDict):
    """The answer of /apply-template: the text that the chat template renders."""

    prompt: str


PATH: Final = "/completion"
_encode: Final = msgspec.json.Encoder().encode


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Return sampling values by llama.cpp's names."""
    return {
        "seed": params.seed,
        **{number.llama_name: getattr(params, name) for name, number in NUMBERS.items()},
        "repeat_last_n": -1,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
    }


class LlamaDialect(Dialect):
    """`settings` are in the last event. `num_top` is None if neither log-probabilities nor token ids are requested.
    With `many` prompts the answer is a list without timings, because these are not measured for each prompt."""

    finishes: ClassVar[dict[str | None, str]] = {"length": "limit", "stop": "eos", None: "none"}

    def __init__(
        self,
        table: TokenBytes,
        *,
        model: str,
        settings: dict[str, Any],
        num_top: int | None,
        with_tokens: bool,
        with_timings: bool,
        many: bool,
    ) -> None:
        self._table = table
        self._model = model
        self._settings = settings
        self._num_top = num_top
        self._with_tokens = with_tokens
        self._with_timings = with_timings and not many
        self._many = many
        self._lines: dict[int, bool] = {}  # by choice: whether the text has more than one, in a stream
        self._generation: Generation | None = None

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        answers = [
            {**self._part(choice, text, tokens), **self._end(generation, choice, "\n" in text)}
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        return _encode(answers if self._many else answers[0])

    def opening(self, generation: Generation) -> bytes:
        self._generation = generation
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, text, [])

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        events = self._event(choice, piece.text, piece.tokens) if piece.text or piece.tokens else b""
        if piece.finish is None or self._generation is None:
            return events
        last = {
            **self._part(choice, "", []),
            **self._end(self._generation, choice, self._lines.get(choice.index, False)),
        }
        return events + b"data: %b\n\n" % _encode(last)

    def closing(self, generation: Generation) -> bytes:
        return b""

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, PATH)

    def _event(self, choice: Choice, text: str, tokens: list[Scored]) -> bytes:
        self._lines[choice.index] = "\n" in text or self._lines.get(choice.index, False)
        fields = self._part(choice, text, tokens)
        if self._with_timings and self._generation is not None:
            fields["timings"] = timings_of(self._generation)
        return b"data: %b\n\n" % _encode(fields)

    def _part(self, choice: Choice, text: str, tokens: list[Scored]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": choice.index,
            "content": text,
            "tokens": [token.token_id for token in tokens] if self._with_tokens else [],
            "stop": False,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(choice.prompt.token_ids),
        }
        if self._num_top:
            fields["completion_probabilities"] = [self._probability(token, self._num_top) for token in tokens]
        return fields

    def _end(self, generation: Generation, choice: Choice, has_new_line: bool) -> dict[str, Any]:
        kind = "word" if choice.stopped is not None else self.finishes.get(choice.finish, "none")
        fields = {
            "stop": True,
            "model": self._model,
            "generation_settings": self._settings,
            "prompt": self._prompt(choice),
            "has_new_line": has_new_line,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": choice.stopped or "",
            "tokens_cached": choice.cache.cached_tokens,
        }
        return fields if self._many else {**fields, "timings": timings_of(generation)}

    def _prompt(self, choice: Choice) -> str:
        if choice.prompt.text is not None:
            return choice.prompt.text
        return b"".join(map(self._table.spelled, choice.prompt.token_ids)).decode("utf-8", "replace")

    def _probability(self, token: Scored, num_top: int) -> dict[str, Any]:
        if token.score is None:
            return self._entry(token.token_id, None)
        top = list(zip(token.score.top_ids, token.score.top_logprobs, strict=True))[:num_top]
        entries = [self._entry(other, value) for other, value in top]
        return {**self._entry(token.token_id, token.score.logprob), "top_logprobs": entries}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._table.spelled(token)
        return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}


def timings_of(generation: Generation) -> dict[str, Any]:
    """Return llama.cpp's timings of an answer with one choice; rates are null if nothing was computed or no time was
    measured."""
    (choice,) = generation.choices
    timings, cached = Timings.of(generation), choice.cache.cached_tokens
    computed = len(choice.prompt.token_ids) - cached
    return {
        "cache_n": cached,
        **_rates("prompt", computed, timings.prompt_s * 1e3),
        **_rates("predicted", choice.num_tokens, timings.decode_s * 1e3),
    }


def _rates(what: str, number: int, milliseconds: float) -> dict[str, Any]:
    measured = number > 0 and milliseconds > 0
    return {
        f"{what}_n": number,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / number if measured else None,
        f"{what}_per_second": number / milliseconds * 1e3 if measured else None,
    }


async def llama_completion(request: Request, server: ServerContext) -> Response:
    """Answer llama-server's /completion, whole or as a stream."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, LlamaCompletionRequest)
    server.check_model(context, body.model)
    completion = body.completion
    params = RequestedParams.of(server, completion).values
    own = {"n_predict": body.n_predict, "n_probs": body.n_probs, "stream": body.stream}
    seed = params.seed if completion.seed is None else completion.seed
    with renamed(body.own_names):
        check_counts(server, completion.choices, len(completion.prompts))
        dialect = LlamaDialect(
            server.table(completion),
            model=context.model,
            settings={**settings_of(params), "seed": seed, **own},
            num_top=body.num_top,
            with_tokens=body.return_tokens,
            with_timings=body.timings_per_token,
            many=body.has_many,
        )
        return await serve_completion(server, context, completion, dialect)


async def apply_template(request: Request, server: ServerContext) -> Response:
    """`{"messages", "tools", ...}` of a chat -> `{"prompt"}`: the text that the chat template makes of it."""
    body = await read_body(request, server, ChatRequest)
    server.check_model(RequestContext.of(request.scope), body.model)
    check_answerable(body, server.model.answers)
    with naming("messages"):
        text = await render(server, server.tokenizer.chat_text, body.messages, body)
    return Response(msgspec.json.encode(TemplateText(prompt=text)), media_type="application/json")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/completion",
        llama_completion,
        body=LlamaCompletionRequest,
        answer=LlamaCompletion | list[LlamaCompletion],
        stream=EVENTS,
        text="Go on with a prompt, in llama-server's form.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
    Route(
        "POST",
        "/apply-template",
        apply_template,
        body=ChatRequest,
        answer=TemplateText,
        text="The text that the chat template makes of a conversation.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
