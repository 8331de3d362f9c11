"""The request types: strict, bounded, closed.

Every number has both bounds, every list and string a limit; `MAX_*` are those of `docs/design.md`. Fields of OpenAI's
that ask for something this server does not do are in `IGNORED`: they pass only with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from forebay.base.errors import InvalidRequest
from forebay.requests.sampling_params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from forebay.server.errors import validation_error

MAX_N: Final = 8
MAX_PROMPTS: Final = 16
MAX_STOP: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 256
MAX_TEXT: Final = 64 << 20  # characters; the body's limit comes first
MAX_IDS: Final = 1 << 22
I32: Final = 2**31 - 1

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=I32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_BYTES)]
Bias = Annotated[float, Field(ge=-100, le=100)]
DecimalId = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]

Harmless = Callable[[Any], bool]


def _one_of(*values: Any) -> Harmless:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


def _label(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 512)


_NOTHING: Final = _one_of(None)
IGNORED: Final[dict[str, Harmless]] = {
    "user": _label,
    "safety_identifier": _label,
    "prompt_cache_key": _label,
    "prompt_cache_retention": _one_of(None, "in-memory", "in_memory"),
    "store": _one_of(None, False),
    "metadata": _one_of(None, {}),
    "service_tier": _one_of(None, "auto", "default"),
    "parallel_tool_calls": _one_of(None, True, False),
    "tools": _one_of(None, []),
    "tool_choice": _one_of(None, "none", "auto"),
    "functions": _one_of(None, []),
    "function_call": _one_of(None, "none", "auto"),
    "response_format": _one_of(None, {"type": "text"}),
    "modalities": _one_of(None, ["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "reasoning_effort": _one_of(None, "none"),
    "verbosity": _one_of(None, "medium"),
    "web_search_options": _NOTHING,
    "suffix": _one_of(None, ""),
}
_MESSAGE_IGNORED: Final[dict[str, Harmless]] = {
    "refusal": _NOTHING,
    "annotations": _one_of(None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "tool_calls": _one_of(None, []),
    "reasoning_content": _NOTHING,
}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    ignored: ClassVar[dict[str, Harmless]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.ignored.items():
            if name in data and not harmless(data[name]):
                raise ValueError(f"{name} is not supported by this server: leave it out")
        return {key: value for key, value in data.items() if key not in cls.ignored}

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        """Raises InvalidRequest that names the field."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            raise validation_error([dict(item) for item in details], list(cls.model_fields)) from error


class StreamOptions(Strict):
    ignored = {"include_obfuscation": _one_of(None, False)}
    include_usage: bool = False


class Sampling(Strict):
    """What completions and chats have in common. None is "the default"."""

    ignored = IGNORED
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=I32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Annotated[dict[DecimalId, Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=I32)] = 0
    cache_salt: Annotated[str, StringConstraints(max_length=128)] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        for stop in self.stop_strings:
            if len(stop.encode()) > MAX_STOP_BYTES:
                raise ValueError(f"a stop string has {len(stop.encode())} bytes; at most {MAX_STOP_BYTES} are allowed")
        return self


class CompletionRequest(Sampling):
    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, le=I32)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError(f"best_of is {self.best_of}; it must equal n, which is {self.choices}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 without echo=true: nothing would be returned")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed: set stream=false")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    ignored = _MESSAGE_IGNORED
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class TemplateArguments(Strict):
    """The variables a client may hand to the chat template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs.model_dump(exclude_none=True) if self.chat_template_kwargs else {}


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS)]
    skip_special_tokens: bool = False


REQUEST_TYPES: Final[tuple[type[Strict], ...]] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def refuse_client_template(data: dict[str, Any]) -> None:
    if "chat_template" in data:
        raise InvalidRequest(
            "chat_template is the operator's choice: the server is started with --chat-template",
            code="chat_template_refused",
            param="chat_template",
        )
