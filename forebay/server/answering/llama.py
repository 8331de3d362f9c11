"""The routes of llama-server's clients: /completion and /apply-template."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.server.answering.calling import check_answerable
from forebay.server.answering.generate import check_counts, naming, serve_completion
from forebay.server.answering.wishes import params_of
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.dialects.llama import LlamaDialect, settings_of
from forebay.server.dialects.llama_request import LlamaCompletionRequest
from forebay.server.dialects.renaming import renamed
from forebay.server.protocol.requests import ChatRequest


async def llama_completion(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, LlamaCompletionRequest)
    server.check_model(body.model)
    completion = body.completion
    params = params_of(server, completion, num_top=-1)
    own = {"n_predict": body.n_predict, "n_probs": body.n_probs, "stream": body.stream}
    seed = params.seed if completion.seed is None else completion.seed
    with renamed(body.own_names):
        check_counts(server, completion.choices, len(completion.prompts))
        dialect = LlamaDialect(
            server.table(completion),
            model=server.model.name,
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
    server.check_model(body.model)
    check_answerable(body, server.model.answers)
    with naming("messages"):
        text = await server.render(server.tokenizer.chat_text, body.messages, body)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
