"""Token ids of prompts, and how the answers to them are read.

A chat's tools and thinking are checked against what the model's chat template can express of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

from forebay.base.errors import InvalidRequest, RequestError
from forebay.engine.client.choice import Reading
from forebay.requests.sampling_params import check_token_ids
from forebay.server.context import ServerContext
from forebay.server.protocol.messages import ChatMessage, Templated
from forebay.server.protocol.requests import ChatRequest, PlainText
from forebay.server.protocol.validation import UNSUPPORTED_FIELD
from forebay.text.answers.declared.declaration import Region
from forebay.text.answers.for_template import for_template
from forebay.text.answers.probes import Findings
from forebay.text.answers.reading import reader_for
from forebay.text.histories import adapted
from forebay.text.token_bytes import TokenBytes
from forebay.text.tokenizer import Tokenizer

T = TypeVar("T")
_NUMBER: Final = "number"  # of a client's message, while messages for the template are made of these


async def encode(server: ServerContext, text: str, body: PlainText) -> list[int]:
    """Return the tokens of a text, made by a worker if it is long. Raises what `Tokenizer.encode` raises."""
    server.tokenizer.wake()
    return await server.workers.run(
        server.client,
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
    found = server.model.answers
    unread = unread_variables(server.tokenizer, body)
    variables = {name: value for name, value in body.template_variables.items() if name not in unread}
    said = [{**message.for_template(), _NUMBER: number} for number, message in enumerate(messages)]
    if "tools" in variables or any(message.keys() & {"tool_calls", "tool_call_id"} for message in said):
        said = for_template(said, variables, found)
    places = {message.pop(_NUMBER): place for place, message in enumerate(said) if _NUMBER in message}
    history = adapted(said, found.history)
    if points := options.pop("breakpoints", ()):
        options["breakpoints"] = [history.moved(point._replace(message=places[point.message])) for point in points]
    return await server.workers.run(
        server.client,
        encode,
        history.messages,
        size=1 << 20,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        max_tokens=server.engine.info.context_length,
        **options,
        **variables,
    )


def unread_variables(tokenizer: Tokenizer, body: Templated) -> list[str]:
    """Return the names of the client's own variables that the chat template does not read."""
    own = body.chat_template_kwargs.others if body.chat_template_kwargs else {}
    template = tokenizer.chat_template
    return [name for name in own if template is not None and name not in template.variables]


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


_TAIL_TOKENS: Final = 128  # more than the tag that opens the thinking has bytes, each of which may be a token


def check_answerable(body: ChatRequest, found: Findings) -> None:
    """Raises InvalidRequest for tools if the model's format of calls is unknown, and for a switch of thinking that the
    model does not have. Clients send an effort unasked: one that the template does not read has no effect."""
    if body.offered_tools and found.formats.calls is None:
        why = found.evidence.get("tool_calls", "there is no chat template")
        raise InvalidRequest(f"this model takes no tools: {why}", code=UNSUPPORTED_FIELD, param="tools")
    (wants, effort, field), thinks = body.requested_thinking, found.formats.thinking is not None
    if wants is not None and effort is None and wants != thinks and not found.can_switch:
        what = "thinks before each answer" if thinks else "does not think"
        why = f"this model {what}, and its chat template knows no other way: leave {field} out"
        raise InvalidRequest(why, code=UNSUPPORTED_FIELD, param=field)


def tail_of(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return the end of a prompt, by which it is known whether the answer begins within the thinking."""
    return tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)


def reading_of(body: ChatRequest, found: Findings, tokenizer: Tokenizer, prompt: list[int]) -> Reading:
    """Return how the answers are read, of a chat with tools or a model that thinks."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.offered_tools}
    formats = found.formats if body.separate_reasoning else found.formats.with_thinking_said
    tail = tail_of(tokenizer, prompt)
    make, opened = partial(reader_for, formats, tools, opened=found.opened(tail)), found.opens_thinking(tail)
    table = _shown(tokenizer.table, found.formats.spellings)
    one_call = body.parallel_tool_calls is False
    thinks = opened.thinks if isinstance(opened, Region) else opened
    return Reading(make, table, one_call=one_call, with_thinking=body.include_reasoning, opened=thinks)


@lru_cache(maxsize=8)
def _shown(table: TokenBytes, spellings: frozenset[str]) -> TokenBytes:
    return table.showing(spellings)
