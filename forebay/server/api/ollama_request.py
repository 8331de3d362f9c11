"""Ollama's requests, and the chats or completions that they become."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, Tag, model_validator

from forebay.requests.foreign import PASSED
from forebay.requests.sampling_params import MAX_TOP_LOGPROBS
from forebay.server.api.embeddings_request import EmbeddingRequest, TextOrTexts
from forebay.server.api.llama_request import LlamaSampling
from forebay.server.api.renaming import renamed
from forebay.server.protocol.ignored import Harmless, one_of
from forebay.server.protocol.messages import MAX_MESSAGES
from forebay.server.protocol.requests import I32, ChatRequest, CompletionRequest
from forebay.server.protocol.strict import History, Label, Strict, Text
from forebay.server.protocol.structured import Object
from forebay.server.protocol.tools import MAX_TOOLS, Tool
from forebay.server.protocol.validation import INVALID_COMBINATION, UNSUPPORTED_FIELD, branch, by_shape, refusal

LATEST: Final = ":latest"  # what Ollama's clients put behind a name without a tag
_ANY_BOOL: Final = Harmless(lambda value: value is None or isinstance(value, bool), {"type": ["boolean", "null"]})
# Options of loading a model: the operator chooses them, and no token depends on them.
_LOADING: Final = frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "numa", "draft_num_predict"),
    }
)


class OllamaOptions(LlamaSampling):
    """`num_predict` -1 or -2 is "as much as there is room for"."""

    passed = LlamaSampling.passed | _LOADING
    num_predict: Annotated[int, Field(ge=-2, le=I32)] | None = None

    def fields(self) -> dict[str, Any]:
        """Return those of a chat or a completion."""
        if self.num_predict is None:
            return self.sampling()
        return {**self.sampling(), **({"n_predict": -1} if self.num_predict < 0 else {"max_tokens": self.num_predict})}

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.num_predict == 0:
            raise refusal(UNSUPPORTED_FIELD, "num_predict", "num_predict is 0: ask for at least 1 token, or -1 for all")
        return self


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


class OllamaMessage(History):
    """A message of the conversation. Images are refused."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Annotated[list[Any], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None

    @model_validator(mode="after")
    def _check_text_only(self) -> Self:
        if self.images:
            raise refusal(
                UNSUPPORTED_FIELD, "images", "images: this route takes text alone; send them to /v1/chat/completions"
            )
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
        return {**LlamaSampling.renamings("options."), **lengths, **formats, **thinking}

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
                body._chat = ChatRequest.parse(asked)
        return body

    @property
    def chat(self) -> ChatRequest | None:
        return self._chat


class OllamaGenerateRequest(Generating):
    """A prompt goes through the chat template, unless it is `raw`. Without one nothing is generated."""

    ignored: ClassVar[dict[str, Harmless]] = {
        "suffix": one_of(None, ""),
        "template": one_of(None, ""),
        "context": one_of(None, []),
        "images": one_of(None, []),
    }
    prompt: Text = ""
    system: Text | None = None
    raw: bool | None = None
    _asked: ChatRequest | CompletionRequest | None = PrivateAttr(None)

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        if body.prompt:
            with renamed(body.own_names):
                body._asked = body._as_completion() if body.raw else body._as_chat()
        return body

    @property
    def asked(self) -> ChatRequest | CompletionRequest | None:
        return self._asked

    @property
    def own_names(self) -> dict[str, str]:
        return {**super().own_names, "messages": "prompt"}

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        beside = "system" if self.system else "think" if self.think else ""
        if self.raw and beside:
            raise refusal(INVALID_COMBINATION, beside, f"a raw prompt goes through no template: leave {beside} out")
        return self

    def _as_chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatRequest.parse({**self._of_chat(), "messages": messages})

    def _as_completion(self) -> CompletionRequest:
        scores = {} if self.num_top < 0 else {"logprobs": self.num_top}
        fields = {"n_predict": -1, **self._common()}
        if "max_tokens" in fields:
            del fields["n_predict"]
        return CompletionRequest.parse({**fields, **scores, "prompt": self.prompt})


class OllamaEmbedRequest(OllamaBody):
    """An input that exceeds the context is refused, with and without `truncate`."""

    ignored: ClassVar[dict[str, Harmless]] = {"truncate": _ANY_BOOL}
    passed = PASSED | {"options"}
    input: TextOrTexts
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None

    @property
    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest.parse({"input": self.input, "dimensions": self.dimensions})


class OllamaShowRequest(OllamaBody):
    """The body of /api/show."""

    ignored: ClassVar[dict[str, Harmless]] = {"verbose": _ANY_BOOL}


def _linked(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a chat's messages. Ollama's calls have no ids: a result belongs to the oldest open call of its tool, or to
    the oldest of all."""
    linked: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id, name
    for number, message in enumerate(messages):
        said: dict[str, Any] = {"role": message.role, "content": message.content or ""}
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
