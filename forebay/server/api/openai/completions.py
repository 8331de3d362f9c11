"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
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
from forebay.server.api.core.logprobs import CompletionLogprobs, RankedLogprob, completion_logprobs
from forebay.server.api.core.serving import check_counts, serve_completion
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import NO_OPTIONS, CompletionRequest
from forebay.text.answers.parts import Part
from forebay.text.token_bytes import TokenBytes


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text of a completion; `index` counts over all prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions when it is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass(kw_only=True)
class CompletionDialect(ChunkDialect):
    """`num_top` is None where no log-probabilities are wanted; `echo` puts the prompt in front, which `whole_table`
    spells with its control tokens."""

    addition = b"text"
    event_object = "text_completion"

    num_top: int | None
    echo: bool
    whole_table: TokenBytes

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choices = []
        for choice, text, tokens in zip(generation.choices, texts, scores, strict=True):
            before = self._prompt_text(choice)
            choices.append(
                CompletionChoice(
                    index=choice.index,
                    text=before + text,
                    logprobs=self._scores(choice, tokens, len(before)),
                    finish_reason=cast(Any, choice.finish),
                    prompt_logprobs=self.prompt_scores_of(choice),
                    token_ids=self.ids_of(choice),
                    prompt_token_ids=self.prompt_ids_of(choice),
                )
            )
        return encode(
            Completion(
                id=self.fields["id"],
                object="text_completion",
                created=self.fields["created"],
                model=self.fields["model"],
                choices=choices,
                usage=generation.usage(),
            )
        )

    def opening(self, generation: Generation) -> bytes:
        if self.usage_of_each:
            self._running = generation
        texts = ((choice, self._prompt_text(choice)) for choice in generation.choices)
        return b"".join(self._first(choice, text) for choice, text in texts if text or self.token_ids)

    def _first(self, choice: Choice, text: str) -> bytes:
        """The event of a prompt: its text if that is echoed, and its token ids if they are wanted."""
        event = self.text(choice, text)
        ids = {"prompt_token_ids": choice.prompt.token_ids} if self.token_ids else {}
        at = event.index(b'"finish_reason":null') if ids else 0
        return event[:at] + encode(ids)[1:-1] + b"," + event[at:] if ids else event

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, encode(text))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish or self.has_new_ids(choice)):
            return b""
        scores = encode(self._tokens(piece.tokens)) if piece.tokens else b"null"
        finish = b"null" if piece.finish is None else encode(piece.finish)
        return self._event(choice, encode(piece.text), scores, finish)

    def _prompt_text(self, choice: Choice) -> str:
        if not self.echo:
            return ""
        text = choice.prompt.text
        if text is not None and (self.num_top is None or self._num_before(choice) >= 0):
            return text
        return _spelled(self.table, choice)  # so that text_offset points into it

    def _num_before(self, choice: Choice) -> int:
        """Return how many characters the tokenizer put before the prompt's text; -1 if its tokens spell another one."""
        text, spelled = choice.prompt.text, _spelled(self.whole_table, choice)
        return len(spelled) - len(text) if text is not None and spelled.endswith(text) else -1

    def _prompt_scores(self, choice: Choice) -> list[Scored]:
        if (num_before := self._num_before(choice)) < 0:
            return choice.prompt_scores()
        scores = choice.prompt_scores(self.whole_table)
        return [replace(scored, offset=max(0, scored.offset - num_before)) for scored in scores]

    def _scores(self, choice: Choice, tokens: list[Scored], shift: int) -> CompletionLogprobs | None:
        if self.num_top is None:
            return None
        generated = [Scored(token.token_id, token.offset + shift, token.score) for token in tokens]
        return self._tokens([*self._prompt_scores(choice), *generated] if self.echo else generated)

    def _tokens(self, tokens: list[Scored]) -> CompletionLogprobs:
        return completion_logprobs(self.table, tokens, self.num_top or 0)


def _spelled(table: TokenBytes, choice: Choice) -> str:
    return b"".join(map(table.in_text, choice.prompt.token_ids)).decode("utf-8", "replace")


async def completions(request: Request, server: ServerContext) -> Response:
    """Continue one or several prompts, whole or as a stream of chunks."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, CompletionRequest)
    server.check_model(context, body.model)
    check_counts(server, body.choices, len(body.prompts))
    options, now = body.stream_options or NO_OPTIONS, int(time.time())
    dialect = CompletionDialect(
        fields=Fields(id=f"cmpl-{context.request_id}", object="", created=now, model=context.model),
        table=server.table(body),
        num_top=body.logprobs,
        echo=bool(body.echo),
        whole_table=server.tokenizer.whole_table,
        include_usage=options.include_usage,
        usage_of_each=options.continuous_usage_stats,
        num_prompt_top=body.prompt_logprobs,
        token_ids=body.return_token_ids,
    )
    return await serve_completion(server, context, body, dialect)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        body=CompletionRequest,
        answer=Completion,
        stream=EVENTS,
        text="Go on with a prompt, in OpenAI's form.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
)
