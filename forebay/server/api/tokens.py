"""Token ids of texts, and back: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.requests.sampling_params import check_token_ids
from forebay.server.api.core.images import chat_ids
from forebay.server.api.core.prompts import encode
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import DetokenizeRequest, TokenizeRequest
from forebay.text.tokenizer import Tokenizer

INLINE_PIECES: Final = 1 << 10  # so many take about a millisecond


class Piece(msgspec.Struct, kw_only=True):
    """A token with its text, or with its bytes if these are no text."""

    id: int
    piece: Annotated[str | list[int], msgspec.Meta(description="The token's text, or its bytes.")]


class Tokens(msgspec.Struct, kw_only=True):
    """The answer of /tokenize."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer: special tokens in their spelling, null for a token that it lacks."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer of /detokenize, under the names of two engines."""

    prompt: str
    content: str


async def tokenize(request: Request, server: ServerContext) -> Response:
    """`{"prompt"}`, `{"content"}` or `{"messages"}` -> `{"tokens", "count", "max_model_len"}`."""
    body = await read_body(request, server, TokenizeRequest)
    context = RequestContext.of(request.scope)
    server.check_model(context, body.model)
    if body.text is not None:
        ids = await encode(server, body.text, body.plain)
    else:
        ids = await chat_ids(server, context, body.messages or [], body)

    def answer() -> Response:
        tokens: Any = [_piece(server.tokenizer, token) for token in ids] if body.with_pieces else ids
        return json_response(Tokens(tokens=tokens, count=len(ids), max_model_len=server.engine.info.context_length))

    large = body.with_pieces and len(ids) > INLINE_PIECES
    return await server.json_workers.run(server.client, answer) if large else answer()


def _piece(tokenizer: Tokenizer, token: int) -> Piece:
    raw = tokenizer.whole_table.in_text(token)
    try:
        return Piece(id=token, piece=raw.decode())
    except UnicodeDecodeError:
        return Piece(id=token, piece=list(raw))


async def tokenizer_info(request: Request, server: ServerContext) -> Response:
    """Return the data by which a client uses this server's tokenizer as its own (lm-eval)."""
    template = server.tokenizer.chat_template
    special = server.tokenizer.special_names
    return json_response(
        TokenizerInfo(
            tokenizer_class="forebay",
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            chat_template=None if template is None else template.source,
            vocab_size=server.tokenizer.vocab_size,
            model_max_length=server.engine.info.context_length,
        )
    )


async def detokenize(request: Request, server: ServerContext) -> Response:
    """`{"tokens"}` -> the text as `prompt`, and as `content` for llama-server's clients."""
    body = await read_body(request, server, DetokenizeRequest)
    server.check_model(RequestContext.of(request.scope), body.model)

    def answer() -> Response:
        check_token_ids("tokens", body.tokens, server.engine.info.vocab_size)
        text = server.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_response(Detokenized(prompt=text, content=text))

    return await server.workers.run(server.client, answer, size=len(body.tokens))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        body=TokenizeRequest,
        answer=Tokens,
        text="The token ids of a text, or of a conversation as the chat template writes it.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
    Route(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        answer=TokenizerInfo,
        text="The special tokens, the chat template and the size of the tokenizer.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        body=DetokenizeRequest,
        answer=Detokenized,
        text="The text of token ids.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
