"""/generate, as SGLang's clients know it: a completion's fields under other names, and texts with their `meta_info`.

In a stream each event has all of a text so far."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Final, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, PrivateAttr, model_validator
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.base.sampling import NUMBERS
from forebay.config.server_args import MAX_COUNT
from forebay.engine.client.choice import Choice, Piece
from forebay.engine.client.scores import Scored, token_name
from forebay.http.errors import DONE, error_ending
from forebay.http.route import EVENTS, Access, Forward, Route
from forebay.requests.sampling_params import MAX_SEED, MAX_TOP_LOGPROBS
from forebay.requests.step_plan import TokenLogprob
from forebay.server.api.core.dialect import Dialect
from forebay.server.api.core.generation import Generation
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import check_counts, serve_completion
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.ignored import Harmless, neutral
from forebay.server.protocol.requests import (
    I32,
    Bootstrap,
    CompletionRequest,
    PlainText,
    Prompts,
    Sampler,
)
from forebay.server.protocol.strict import Label, Text
from forebay.server.protocol.validation import INVALID_COMBINATION, MISSING_FIELD, refusal
from forebay.text.answers.parts import Part
from forebay.text.token_bytes import TokenBytes

_encode: Final = msgspec.json.Encoder().encode


class GeneratedMeta(msgspec.Struct, kw_only=True):
    """Log-probabilities are lists of the value, the token's id and its text or null."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    e2e_latency: float
    output_token_logprobs: list[tuple[float, int, str | None]] | UnsetType = UNSET
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    """One answer of /generate: a text, and what SGLang calls its `meta_info`."""

    text: str
    output_ids: list[int] | UnsetType = UNSET
    meta_info: GeneratedMeta
    index: int | UnsetType = UNSET  # of a stream with many answers


class NativeDialect(Dialect):
    """`num_top` is None where no log-probabilities are wanted; `names` puts the tokens' texts into them. `many`: the
    answer is a list. `adapter` is the one that is applied, "" without one."""

    def __init__(
        self, answer_id: str, table: TokenBytes, *, num_top: int | None, names: bool, many: bool, adapter: str
    ) -> None:
        self._id = answer_id
        self._adapter = adapter
        self._table = table
        self._num_top = num_top
        self._names = names
        self._many = many
        self._started = time.monotonic()
        self._texts: dict[int, list[str]] = {}  # of a stream, by choice
        self._scores: dict[int, list[Scored]] = {}

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        answers = [self._answer(*one) for one in zip(generation.choices, texts, scores, strict=True)]
        return _encode(answers if self._many else answers[0])

    def opening(self, generation: Generation) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self.chunk(choice, Piece(text, [], None))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish):
            return b""
        texts = self._texts.setdefault(choice.index, [])
        texts.append(piece.text)
        scores = self._scores.setdefault(choice.index, [])
        scores += piece.tokens
        answer = self._answer(choice, "".join(texts), scores)
        answer.index = choice.index if self._many else UNSET
        return b"data: %b\n\n" % _encode(answer)

    def closing(self, generation: Generation) -> bytes:
        return DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _answer(self, choice: Choice, text: str, scores: list[Scored]) -> Generated:
        meta = GeneratedMeta(
            id=f"{self._id}-{choice.index}" if self._many else self._id,
            finish_reason=_finish(choice),
            prompt_tokens=len(choice.prompt.token_ids),
            completion_tokens=choice.num_tokens,
            cached_tokens=choice.cache.cached_tokens,
            weight_version=choice.weight_version,
            adapter=self._adapter or UNSET,
            e2e_latency=time.monotonic() - self._started,
        )
        if self._num_top is None:
            return Generated(text=text, meta_info=meta)
        known = [(token.token_id, token.score) for token in scores if token.score is not None]
        meta.output_token_logprobs = [self._entry(token, score.logprob) for token, score in known]
        if self._num_top:
            meta.output_top_logprobs = [self._top(score) for _, score in known]
        return Generated(text=text, output_ids=[token for token, _ in known], meta_info=meta)

    def _top(self, score: TokenLogprob) -> list[tuple[float, int, str | None]]:
        pairs = zip(score.top_ids, score.top_logprobs, strict=True)
        return [self._entry(token, value) for token, value in pairs][: self._num_top]

    def _entry(self, token: int, logprob: float) -> tuple[float, int, str | None]:
        return logprob, token, token_name(self._table, token) if self._names else None


def _finish(choice: Choice) -> dict[str, Any] | None:
    match choice.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": choice.stopped}
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case other:
            return {"type": other}


_DEFAULT_TOKENS: Final = 128
_SAMPLING: Final = {  # by what completions call it
    "max_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "include_stop_str_in_output": "no_stop_trim",
    "min_tokens": "min_new_tokens",
    "skip_special_tokens": "skip_special_tokens",
    **{name: name for name in (*NUMBERS, "n", "stop", "stop_token_ids", "stop_regex", "ignore_eos")},
}


class NativeSampling(Sampler):
    """The `sampling_params` of /generate."""

    ignored: ClassVar[dict[str, Harmless]] = neutral("generate_sampling")
    max_new_tokens: Annotated[int, Field(ge=1, le=I32)] = _DEFAULT_TOKENS
    min_new_tokens: Annotated[int, Field(ge=0, le=I32)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    sampling_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    no_stop_trim: bool = False
    json_schema: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None


class NativeRequest(PlainText, Bootstrap):
    """Either `text` or `input_ids`, one or several; `lora_path` is the name of a loaded adapter."""

    ignored: ClassVar[dict[str, Harmless]] = neutral("generate")
    text: Prompts | None = None
    input_ids: Prompts | None = None
    sampling_params: NativeSampling = NativeSampling()
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: Label | None = None
    lora_path: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=I32)] = 0
    _completion: CompletionRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        with renamed(body.renamings):
            body._completion = CompletionRequest.parse(body._as_completion())
        return body

    @property
    def completion(self) -> CompletionRequest:
        return self._completion

    @property
    def renamings(self) -> dict[str, str]:
        """Which of this body's fields a completion's stand for."""
        source = "text" if self.input_ids is None else "input_ids"
        return {"prompt": source, **{name: f"sampling_params.{own}" for name, own in _SAMPLING.items()}}

    @property
    def has_many(self) -> bool:
        """Whether the answer is a list."""
        prompt = self.text if self.input_ids is None else self.input_ids
        return self.sampling_params.n > 1 or (isinstance(prompt, list) and not isinstance(prompt[0], int))

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            what = "either text or input_ids is to be generated from: send one of them"
            raise refusal(MISSING_FIELD if self.text is None else INVALID_COMBINATION, "text", what)
        for name, value, wrong in (("text", self.text, int), ("input_ids", self.input_ids, str)):
            first = value[0] if isinstance(value, list) else value
            if isinstance(first, wrong) or (isinstance(first, list) and wrong is int):
                raise refusal(INVALID_COMBINATION, name, f"{name} has what is for the other: texts or token ids")
        return self

    def _as_completion(self) -> dict[str, Any]:
        own = {
            name: getattr(self, name)
            for name in ("stream", "priority", *PlainText.model_fields, *Bootstrap.model_fields)
        }
        sampling = {name: getattr(self.sampling_params, theirs) for name, theirs in _SAMPLING.items()}
        prompt = self.text if self.input_ids is None else self.input_ids
        logprobs = self.top_logprobs_num if self.return_logprob else None
        return {**own, **{k: v for k, v in sampling.items() if v is not None}, "prompt": prompt, "logprobs": logprobs}


async def native(request: Request, server: ServerContext) -> Response:
    """Answer SGLang's /generate, whole or as a stream."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, NativeRequest)
    server.check_model(context, body.lora_path, field="lora_path")
    completion, num_top = body.completion, body.top_logprobs_num if body.return_logprob else None
    with renamed(body.renamings):
        check_counts(server, completion.choices, len(completion.prompts))
        dialect = NativeDialect(
            body.rid or context.request_id,
            server.table(completion),
            num_top=num_top,
            names=body.return_text_in_logprobs,
            many=body.has_many,
            adapter=context.adapter,
        )
        return await serve_completion(server, context, completion, dialect, known_as=body.rid)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/generate",
        native,
        body=NativeRequest,
        answer=Generated | list[Generated],
        stream=EVENTS,
        text="Go on with a prompt, in SGLang's form.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
)
