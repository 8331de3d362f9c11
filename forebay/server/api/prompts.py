"""Token ids of prompts: texts, and conversations that the chat template renders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from forebay.base.errors import RequestError
from forebay.requests.sampling_params import check_token_ids
from forebay.server.api.calling import for_template
from forebay.server.context import ServerContext
from forebay.server.protocol.messages import ChatMessage, Templated
from forebay.server.protocol.requests import PlainText

T = TypeVar("T")


async def encode(server: ServerContext, text: str, body: PlainText) -> list[int]:
    """Return the tokens of a text, made by a worker if it is long. Raises what `Tokenizer.encode` raises."""
    server.tokenizer.wake()
    return await server.workers.run(
        server.tokenizer.encode,
        text,
        size=server.tokenizer.work_chars(text),
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
        max_tokens=server.engine.info.context_length,
    )


async def render(
    server: ServerContext, encode: Callable[..., T], messages: Sequence[ChatMessage], body: Templated, **options: Any
) -> T:
    """Render a conversation with `encode`, of the tokenizer. Templates always run in a worker."""
    server.tokenizer.wake()
    variables = body.template_variables
    return await server.workers.run(
        encode,
        for_template([message.for_template() for message in messages], variables, server.model.answers),
        size=1 << 20,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        max_tokens=server.engine.info.context_length,
        **options,
        **variables,
    )


async def prompt_ids(server: ServerContext, body: PlainText, prompt: str | list[int], field: str) -> list[int]:
    """Return the token ids of a text, or check those that were sent in `field`."""
    if isinstance(prompt, str):
        return await encode(server, prompt, body)
    info = server.engine.info
    if len(prompt) <= info.context_length:  # a longer one is refused for that
        check_token_ids(field, prompt, info.vocab_size)
    return prompt


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Errors from below the protocol, where texts have no field, get it as their param."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or field
        raise
