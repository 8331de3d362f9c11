"""The request types: strict, bounded, closed.

Every number has both bounds, every list and string a limit; the operator says how many choices and prompts there may be
(`--max-n`, `--max-prompts`). Of `IGNORED` fields of OpenAI's only values pass that change nothing in the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, Tag, model_validator

from forebay.base.foreign import PASSED
from forebay.base.sampling import NUMBERS
from forebay.config.server_args import MAX_COUNT
from forebay.requests.sampling_params import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP,
    MAX_STOP_BYTES,
    MAX_STOP_PATTERNS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from forebay.requests.transfers import MAX_ROOM
from forebay.server.protocol.cache_control import AgentHints, CacheControl
from forebay.server.protocol.ignored import IGNORED, neutral, one_of
from forebay.server.protocol.messages import Messages, Templated, Thinking, check_breakpoints, text_or_list
from forebay.server.protocol.numbers import Numbered
from forebay.server.protocol.strict import CacheSalt, Label, Sender, Strict, Text
from forebay.server.protocol.structured import Structured
from forebay.server.protocol.tools import MAX_TOOLS, AllowedTools, AnyTool, TextTool, ToolChoice
from forebay.server.protocol.validation import (
    DECIMAL_ID,
    INVALID_COMBINATION,
    INVALID_VALUE,
    MISSING_FIELD,
    UNSUPPORTED_FIELD,
    branch,
    by_shape,
    refusal,
)
from forebay.text.resumption import Breakpoint
from forebay.text.stop_patterns import BadPattern, machine_of

TOOL_FIELDS: Final = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")  # chats have them
MAX_IDS: Final = 1 << 22
I32: Final = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=I32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_BYTES)]
Bias = Annotated[float, Field(ge=LOGIT_BIAS[0], le=LOGIT_BIAS[1])]
DecimalId = Annotated[str, StringConstraints(pattern=DECIMAL_ID)]


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        return branch("ids")
    return text_or_list(value)


def _one_prompt_shape(value: Any) -> str | None:
    return branch("ids") if isinstance(value, list) else branch("text") if isinstance(value, str) else None


OnePrompt = Annotated[
    Annotated[Text, Tag(branch("text"))] | Annotated[TokenIds, Tag(branch("ids"))],
    by_shape(_one_prompt_shape, "a string or a list of token ids"),
]
Prompts = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[TokenIds, Tag(branch("ids"))]
    | Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_COUNT, fail_fast=True), Tag(branch("list"))],
    by_shape(_prompt_shape, "a string, a list of token ids, or a list of these"),
]


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    Annotated[StopString, Tag(branch("text"))]
    | Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of strings"),
    AfterValidator(_listed),
]


StopPatterns = Annotated[
    Annotated[StopString, Tag(branch("text"))]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_PATTERNS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of strings"),
    AfterValidator(_listed),
]


def _one_or_list(value: Any) -> str | None:
    return branch("list") if isinstance(value, list) else branch("one") if isinstance(value, str | int) else None


def _one_or_list_of(kind: Any, wanted: str) -> Any:
    many = Annotated[list[kind], Field(min_length=1, max_length=MAX_COUNT, fail_fast=True), Tag(branch("list"))]
    return Annotated[Annotated[kind, Tag(branch("one"))] | many, by_shape(_one_or_list, wanted)]


Host = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Port = Annotated[int, Field(ge=1, le=65535)]
BootstrapHost = _one_or_list_of(Host, "a host or a list")
BootstrapPort = _one_or_list_of(Port | None, "a port or a list of ports")
BootstrapRoom = _one_or_list_of(Annotated[int, Field(ge=0, le=MAX_ROOM)], "a number or a list of numbers")


class Bootstrap(Strict):
    """Where the two halves of a request meet, of which a gateway sends the same body to each: see
    `server.api.core.rendezvous`. Lists have an entry for each prompt and choice."""

    bootstrap_host: BootstrapHost | None = None  # type: ignore[valid-type]
    bootstrap_port: BootstrapPort | None = None  # type: ignore[valid-type]
    bootstrap_room: BootstrapRoom | None = None  # type: ignore[valid-type]


DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's
_MOST_TOKENS: Final = ("n_predict", "max_tokens", "max_completion_tokens")


class StreamOptions(Strict):
    """Options of a stream: token counts in a last chunk, or in every chunk."""

    ignored = {"include_obfuscation": one_of(None, False)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


NO_OPTIONS: Final = StreamOptions()


class Sampler(Numbered, numbers={name: name for name in NUMBERS}):
    """How tokens are chosen and when they end, by the names that all dialects have for it."""

    stop: Stop | None = None
    stop_regex: StopPatterns | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


# By `prompt_cache_retention`, for how many seconds the whole prompt is kept.
RETENTION_S: Final = {None: 0.0, "in_memory": 300.0, "in-memory": 300.0, "24h": 86400.0}


class Choosing(Sampler, Structured):
    """Which tokens an answer may have: fields that all dialects take by these names, beside names of their own."""

    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[dict[DecimalId, Bias], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=I32)] = 0
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=I32)] = 0
    cache_salt: CacheSalt | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    nvext: AgentHints | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the fields of this class that the client sent, as a chat or a completion takes them."""
        sent = self.model_fields_set & Choosing.model_fields.keys()
        return {k: v for k, v in self.model_dump(include=sent, by_alias=True, warnings=False).items() if v is not None}


class Sampling(Choosing, Sender, Bootstrap):
    """Fields that completions and chats share. None is "the default"."""

    ignored = IGNORED
    passed = PASSED
    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n_predict: Annotated[int, Field(ge=-1, le=I32)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool = False
    receipt: bool = False
    request_id: Label | None = None

    @cached_property
    def choices(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal(
                INVALID_COMBINATION, "stream_options", "stream_options is only allowed with stream=true: set it"
            )
        if self.stream and self.prompt_logprobs is not None:
            what = "prompt_logprobs cannot be streamed: set stream=false"
            raise refusal(INVALID_COMBINATION, "prompt_logprobs", what)
        if self.stop_regex:
            _check_patterns(self.stop_regex)
        longest = [name for name in _MOST_TOKENS if getattr(self, name, None) is not None]
        if self.n_predict is not None and (len(longest) > 1 or self.n_predict == 0):
            what = f"{' and '.join(longest)}: give one of them, at least 1 (n_predict -1: as many as there is room)"
            raise refusal(INVALID_COMBINATION, "n_predict", what)
        if self.stop:
            _check_lengths(self.stop)
        return self


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            machine_of(pattern)
        except BadPattern as error:
            raise refusal(INVALID_VALUE, "stop_regex", f"stop_regex cannot be used: {error}") from error


def _check_lengths(stops: Iterable[str]) -> None:
    for stop in stops:
        if len(stop.encode()) > MAX_STOP_BYTES:
            what = f"a stop string has {len(stop.encode())} bytes: at most {MAX_STOP_BYTES} are allowed"
            raise refusal(INVALID_VALUE, "stop", what)


class PlainText(Strict):
    """How a text that goes through no template becomes tokens: as the checkpoint's tokenizer makes them."""

    add_special_tokens: bool = True
    parse_special: bool = True


class CompletionRequest(PlainText, Sampling):
    """The body of /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=I32)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            what = f"best_of is {self.best_of} and n is {self.choices}: only best_of = n is supported, leave it out"
            raise refusal(UNSUPPORTED_FIELD, "best_of", what)
        if self.max_tokens == 0 and not self.echo:
            what = "max_tokens is 0 without echo=true: nothing would be returned, ask for at least 1"
            raise refusal(INVALID_COMBINATION, "max_tokens", what)
        if self.stream and self.echo and self.logprobs is not None:
            raise refusal(INVALID_COMBINATION, "echo", "echo with logprobs cannot be streamed: set stream=false")
        return self

    @cached_property
    def wanted(self) -> int | None:
        """The maximum number of tokens to generate; None for all that fit into the context."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return DEFAULT_COMPLETION_TOKENS if asked is None else None if asked < 0 else asked

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list: a single text or a single list of token ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ChatRequest(Thinking, Templated, Sampling):
    """`include_reasoning` false leaves the thinking out of the answer, `separate_reasoning` false in the text."""

    ignored = {
        **{name: harmless for name, harmless in IGNORED.items() if name not in TOOL_FIELDS},
        **neutral("chat"),
    }
    messages: Messages
    cache_control: CacheControl | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_thinking_tokens: Annotated[int, Field(ge=0, le=I32)] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    max_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @cached_property
    def wanted(self) -> int | None:
        """As for completions."""
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return asked if self.n_predict is None else None if self.n_predict < 0 else self.n_predict

    @cached_property
    def offered_tools(self) -> list[AnyTool]:
        """The tools that the prompt shows."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def allowed_names(self) -> frozenset[str] | None:
        """The names of the tools that the model may call; None for all of them."""
        chosen = self.tool_choice
        return None if chosen is None or isinstance(chosen, str) else frozenset(chosen.tool_names)

    @property
    def must_call(self) -> bool:
        """Return whether the answer must call a tool."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in (None, "auto", "none")

    @property
    def text_tools(self) -> frozenset[str]:
        """The names of the tools that take one text."""
        return frozenset(tool.function.name for tool in self.tools or () if isinstance(tool, TextTool))

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template, with the offered tools and the verbosity."""
        shown = (
            tool.function.model_dump(exclude_none=True, exclude={"strict", "cache_control"})
            for tool in self.offered_tools
        )
        tools = [{"type": "function", "function": function} for function in shown]
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {**super().template_variables, **verbosity, **({"tools": tools} if tools else {})}

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal(
                INVALID_COMBINATION, "top_logprobs", "top_logprobs is only allowed with logprobs=true: set it"
            )
        if any((self.tools, self.cache_control)):
            check_breakpoints(len(_marks_of_tools(self)) + len(_marks_of_messages(self)))
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            what = f"there are two tools with the name {_repeated(names)}: give each one its own"
            raise refusal(INVALID_VALUE, "tools", what)
        if self.tool_choice == "required" and not names:
            raise refusal(INVALID_COMBINATION, "tool_choice", "tool_choice is required, and there are no tools")
        chosen = self.tool_choice
        if chosen is not None and not isinstance(chosen, str) and (unknown := set(chosen.tool_names) - set(names)):
            what = f"there is no tool with the name {min(unknown)}"
            raise refusal(INVALID_VALUE, f"tool_choice.{chosen.names_at}", what)
        return self

    @property
    def marks(self) -> list[tuple[Breakpoint, float]]:
        """Return the client's marks, and for how many seconds each prefix is kept. Those of tools are one, in front of
        the first message of the user, behind the text of the system."""
        marks, of_tools = _marks_of_messages(self), _marks_of_tools(self)
        first = next((i for i, message in enumerate(self.messages) if message.role == "user"), None)
        return marks if first is None or not of_tools else [(Breakpoint(first, 0), max(of_tools)), *marks]


def _marks_of_messages(body: ChatRequest) -> list[tuple[Breakpoint, float]]:
    """Return the marks in messages; that of the whole body is at the end of the last message."""
    marks = [(Breakpoint(i, end), ttl_s) for i, message in enumerate(body.messages) for end, ttl_s in message.marks]
    if body.cache_control is not None:
        marks.append((Breakpoint(len(body.messages) - 1, body.messages[-1].num_chars), body.cache_control.ttl_s))
    return marks


def _marks_of_tools(body: ChatRequest) -> list[float]:
    """Return for each mark of a tool for how many seconds it is kept."""
    return [ttl_s for tool in body.tools or () for ttl_s in tool.marks]


def _repeated(names: list[str]) -> str:
    """Return the first of the names that occurs twice."""
    return next(name for name in names if names.count(name) > 1)


class TokenizeRequest(PlainText, Templated):
    """One of `prompt`, `messages` and `content`. The last is llama-server's, with `add_special` for whether special
    tokens are added, and with `with_pieces` for the text of each token."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    content: Text | None = None
    add_special: bool = False
    with_pieces: bool = False

    @property
    def text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    @property
    def plain(self) -> PlainText:
        """How the text becomes tokens."""
        if self.content is None:
            return self
        return PlainText(add_special_tokens=self.add_special, parse_special=self.parse_special)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if not given:
            raise refusal(MISSING_FIELD, "prompt", "there is neither prompt nor messages: send one of them")
        if len(given) > 1:
            what = f"there are both {given[0]} and {given[1]}: send one of them"
            raise refusal(INVALID_COMBINATION, given[1], what)
        return self


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
    skip_special_tokens: bool = False
