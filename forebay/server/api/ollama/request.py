"""Ollama's requests, and the chats or completions that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, Tag, ValidationInfo, model_validator

from forebay.base.foreign import PASSED, passed_fields
from forebay.requests.sampling_params import MAX_TOP_LOGPROBS
from forebay.server.api.core.renaming import renamed
from forebay.server.api.llama.request import LlamaSampling
from forebay.server.api.openai.embeddings_request import EmbeddingRequest, TextOrTexts
from forebay.server.protocol.ignored import Harmless, neutral
from forebay.server.protocol.images import Source, SourceText, accepts_images
from forebay.server.protocol.messages import MAX_MESSAGES, MAX_PARTS
from forebay.server.protocol.requests import I32, ChatRequest, CompletionRequest
from forebay.server.protocol.strict import History, Label, Strict, Text
from forebay.server.protocol.structured import Object
from forebay.server.protocol.tools import MAX_TOOLS, Tool
from forebay.server.protocol.validation import (
    INVALID_COMBINATION,
    MISSING_FIELD,
    UNSUPPORTED_FIELD,
    branch,
    by_shape,
    refusal,
)

LATEST: Final = ":latest"  # what Ollama's clients put behind a name without a tag
_ANY_BOOL: Final = Harmless(lambda value: value is None or isinstance(value, bool), {"type": ["boolean", "null"]})


class OllamaOptions(LlamaSampling):
    """`num_predict` below 1 is "as much as there is room for"."""

    ignored: ClassVar[dict[str, Harmless]] = {}
    # Ollama's own engine ignores the samplers that llama.cpp's clients switch off: their values change nothing here.
    passed = LlamaSampling.passed | LlamaSampling.ignored.keys() | passed_fields("ollama_loading", "ollama_samplers")
    num_predict: Annotated[int, Field(ge=-2, le=I32)] | None = None

    def fields(self) -> dict[str, Any]:
        """Return those of a chat or a completion."""
        if self.num_predict is None:
            return self.sampling()
        return {**self.sampling(), **({"max_tokens": self.num_predict} if self.num_predict > 0 else {"n_predict": -1})}


def _format_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("schema") if isinstance(value, dict) else None


def _think_shape(value: Any) -> str | None:
    return branch("bool") if isinstance(value, bool) else branch("level") if isinstance(value, str) else None


Format = Annotated[
    Annotated[Literal["", "json"], Tag(branch("text"))] | Annotated[Object, Tag(branch("schema"))],
    by_shape(_format_shape, 'json, "" or a JSON schema'),
]
Think = Annotated[
    Annotated[bool, Tag(branch("bool"))] | Annotated[Literal["low", "medium", "high"], Tag(branch("level"))],
    by_shape(_think_shape, "true, false, low, medium or high"),
]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class OllamaCall(History):
    """The function that was called; `arguments` are an object."""

    ignored: ClassVar[dict[str, Harmless]] = {
        "index": Harmless(lambda value: value is None or isinstance(value, int), {"type": ["integer", "null"]})
    }
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    arguments: Object = Field(default_factory=dict)


class OllamaToolCall(History):
    """A call that the assistant made in an earlier turn."""

    id: Label | None = None
    type: Literal["function"] = "function"
    function: OllamaCall


Images = Annotated[list[SourceText], Field(max_length=MAX_PARTS, fail_fast=True)]
"""Files in base64."""


def _check_images(images: Sequence[Source] | None, info: ValidationInfo) -> None:
    if images and not accepts_images(info):
        raise refusal(UNSUPPORTED_FIELD, "images", "this model takes no images: leave images out")


def _content(images: Sequence[Source] | None, text: str) -> str | list[dict[str, Any]]:
    """Return a chat's content: the images, as Ollama's templates have them, in front of the text."""
    parts = [{"type": "image_url", "image_url": {"url": _url(image.take())}} for image in images or ()]
    return [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text


def _url(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"


class OllamaMessage(History):
    """A message of the conversation; users send images with it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None

    @model_validator(mode="after")
    def _check_shown(self, info: ValidationInfo) -> Self:
        _check_images(self.images, info)
        if self.images and self.role not in ("user", "tool"):
            what = f"images are for messages of role user and tool, and role is {self.role}: leave them out"
            raise refusal(INVALID_COMBINATION, "images", what)
        return self


class OllamaBody(Strict):
    """Fields of all bodies. `keep_alive` changes nothing: the operator sets when the engine sleeps."""

    passed = PASSED
    model: ModelName

    @property
    def model_name(self) -> str:
        return self.model.removesuffix(LATEST)


class Generating(OllamaBody):
    """Streams unless `stream` is false."""

    format: Format | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_top(self) -> int:
        """The number of alternatives of each token; -1 without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def own_names(self) -> dict[str, str]:
        """The names here by those of a chat's or a completion's fields."""
        lengths = dict.fromkeys(("n_predict", "max_tokens"), "options.num_predict")
        formats = dict.fromkeys(("response_format", "guided_json"), "format")
        thinking = dict.fromkeys(("enable_thinking", "reasoning_effort"), "think")
        images = {r"messages\.(\d+)\.content\.\d+(\.image_url(\.url)?)?": r"messages.\1.images"}
        return {**images, **LlamaSampling.renamings("options."), **lengths, **formats, **thinking}

    def _common(self) -> dict[str, Any]:
        """Fields that a chat and a completion have under the same names."""
        fields: dict[str, Any] = {"stream": self.stream is not False}
        fields |= self.options.fields() if self.options is not None else {}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["guided_json"] = self.format
        return fields

    def _of_chat(self) -> dict[str, Any]:
        """Fields of a chat beside its messages."""
        thinking = {} if self.think is None else {"enable_thinking": bool(self.think)}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        scores = {"logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**self._common(), **thinking, **effort, **scores}

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            what = "top_logprobs is only allowed with logprobs=true: set it"
            raise refusal(INVALID_COMBINATION, "top_logprobs", what)
        return self


class OllamaChatRequest(Generating):
    """A request without messages only asks for the model to be loaded; nothing is generated."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = []
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    _chat: ChatRequest | None = PrivateAttr(None)

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        if body.messages:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            asked = {**body._of_chat(), "messages": _linked(body.messages), **({"tools": tools} if tools else {})}
            with renamed(body.own_names):
                body._chat = ChatRequest.parse(asked, images=images)
        return body

    @property
    def chat(self) -> ChatRequest | None:
        return self._chat


class OllamaGenerateRequest(Generating):
    """A prompt goes through the chat template, unless it is `raw`. Without one nothing is generated."""

    ignored: ClassVar[dict[str, Harmless]] = neutral("ollama_generate")
    prompt: Text = ""
    images: Images | None = None
    system: Text | None = None
    raw: bool | None = None
    _asked: ChatRequest | CompletionRequest | None = PrivateAttr(None)

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        if body.prompt or body.images:
            with renamed(body.own_names):
                body._asked = body._as_completion() if body.raw else body._as_chat(images)
        return body

    @property
    def asked(self) -> ChatRequest | CompletionRequest | None:
        return self._asked

    @property
    def own_names(self) -> dict[str, str]:
        return {
            r"messages\.\d+\.content\.\d+(\.image_url(\.url)?)?": "images",
            **super().own_names,
            "messages": "prompt",
        }

    @model_validator(mode="after")
    def _check_raw(self, info: ValidationInfo) -> Self:
        _check_images(self.images, info)
        beside = "system" if self.system else "think" if self.think else "images" if self.images else ""
        if self.raw and beside:
            raise refusal(INVALID_COMBINATION, beside, f"a raw prompt goes through no template: leave {beside} out")
        return self

    def _as_chat(self, images: bool) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": _content(self.images, self.prompt)}]
        return ChatRequest.parse({**self._of_chat(), "messages": messages}, images=images)

    def _as_completion(self) -> CompletionRequest:
        scores = {} if self.num_top < 0 else {"logprobs": self.num_top}
        fields = {"n_predict": -1, **self._common()}
        if "max_tokens" in fields:
            del fields["n_predict"]
        return CompletionRequest.parse({**fields, **scores, "prompt": self.prompt})


class OllamaEmbedRequest(OllamaBody):
    """An input that exceeds the context is refused, with and without `truncate`."""

    ignored: ClassVar[dict[str, Harmless]] = {"truncate": _ANY_BOOL}
    passed = PASSED | passed_fields("ollama_embed")
    input: TextOrTexts
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None

    @property
    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest.parse({"input": self.input, "dimensions": self.dimensions})


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of /api/embeddings, which Ollama has replaced by /api/embed: one prompt."""

    passed = PASSED | passed_fields("ollama_embed")
    prompt: Text

    @property
    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest.parse({"input": self.prompt})


class NamedModel(Strict):
    """The bodies that name a model, and nothing to compute: as `model`, or as older clients do as `name`."""

    model: ModelName | None = None
    name: ModelName | None = None

    @property
    def model_name(self) -> str:
        return (self.model or self.name or "").removesuffix(LATEST)

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.model_name:
            raise refusal(MISSING_FIELD, "model", "model is missing: name a model of /api/tags")
        return self


class OllamaShowRequest(NamedModel):
    """The body of /api/show."""

    ignored: ClassVar[dict[str, Harmless]] = {"verbose": _ANY_BOOL}
    passed = PASSED | passed_fields("ollama_show")


class OllamaPullRequest(NamedModel):
    """The body of /api/pull."""

    ignored: ClassVar[dict[str, Harmless]] = {"insecure": _ANY_BOOL}
    stream: bool | None = None


def _linked(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a chat's messages. Ollama's calls have no ids: a result belongs to the oldest open call of its tool, or to
    the oldest of all."""
    linked: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id, name
    for number, message in enumerate(messages):
        said: dict[str, Any] = {"role": message.role, "content": _content(message.images, message.content or "")}
        if message.thinking and message.role == "assistant":
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_call(call, f"call_{number}_{i}") for i, call in enumerate(message.tool_calls)]
            open_calls += [(call["id"], call["function"]["name"]) for call in calls]
            said |= {"tool_calls": calls, "content": message.content or None}
        if message.role == "tool":
            said["tool_call_id"] = message.tool_call_id or _answered(open_calls, message.tool_name)
        linked.append(said)
    return linked


def _call(call: OllamaToolCall, own_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
    return {"id": call.id or own_id, "type": "function", "function": function}


def _answered(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Return the id of the call that a result without an id answers, and close it."""
    answered = next((call for call in open_calls if call[1] == name), open_calls[0] if open_calls else None)
    if answered is None:
        return "call_unknown"
    open_calls.remove(answered)
    return answered[0]
