"""The shapes of the answers, for /openapi.json. Nothing is built from these types: tests compare answers with them."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

from forebay.base.sampling import OF_MODELS
from forebay.scheduler.state import PoolState
from forebay.server.api.generation import CacheUsage


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(TypedDict):
    """Every refusal and every failure, in a body or as an event of a stream."""

    error: Error


class AnthropicDetails(TypedDict):
    error_code: str


class AnthropicError(TypedDict):
    type: str
    message: str
    details: AnthropicDetails


class AnthropicErrorAnswer(TypedDict):
    """The error body of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicError


class CachedDetails(TypedDict):
    cached_tokens: int


class ReasoningDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: NotRequired[ReasoningDetails]
    weight_version: int
    cache: CacheUsage


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class RankedLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class GeneratedMeta(TypedDict):
    """Log-probabilities are lists of the value, the token's id and its text or null."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: int
    e2e_latency: float
    output_token_logprobs: NotRequired[list[tuple[float, int, str | None]]]
    output_top_logprobs: NotRequired[list[list[tuple[float, int, str | None]]]]


class Generated(TypedDict):
    text: str
    output_ids: NotRequired[list[int]]
    meta_info: GeneratedMeta


class Alternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """`content` has the tokens of the text; where answers are read, the others are in the lists of what they belong
    to."""

    content: list[ScoredToken]
    reasoning_content: NotRequired[list[ScoredToken]]
    tool_calls: NotRequired[list[ScoredToken]]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class CustomCall(TypedDict):
    name: str
    input: str


class Call(TypedDict):
    """`function`, or `custom` for a tool that takes one text."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionCall]
    custom: NotRequired[CustomCall]


class Message(TypedDict):
    """`content` is null where the answer is calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]


class ThinkingDetails(TypedDict):
    thinking_tokens: int


class AnthropicUsage(TypedDict):
    """The prompt's tokens are in one of three numbers each. `moved`: what of the system text stands behind it now."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    weight_version: int
    cache: CacheUsage
    moved: NotRequired[list[str]]


class AnthropicBlock(TypedDict):
    """`text`; `thinking` and `signature`; or `id`, `name` and `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(TypedDict):
    input_tokens: int


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class TokenizerInfo(TypedDict):
    """Special tokens are as they are spelled; null where the tokenizer has none."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Detokenized(TypedDict):
    prompt: str


class Health(TypedDict):
    """`reason` is a code, `message` its words where something is wrong."""

    status: Literal["ok", "unhealthy", "not_ready"]
    reason: str
    message: NotRequired[str]


class Inside(TypedDict):
    num_inside: int
    draining: bool


class Occupied(TypedDict):
    """The memory that the engine has of all that it can release."""

    phase: Literal["serving", "draining", "asleep", "waking"]
    released: list[str]
    paused: bool
    num_bytes: dict[str, int]
    weight_version: int
    last_sleep_s: float
    last_wake_s: float
    kept_tokens: int
    kept_bytes: int


class Done(Occupied):
    success: Literal[True]


class Sleeping(TypedDict):
    is_sleeping: bool


class DebugState(TypedDict):
    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    pools: list[PoolState]
    last_step_age_s: float
    oldest_wait_s: float
    counters: dict[str, float]
    map: list[int]
    memory: Occupied
    server: Inside


LIMITS: Final = ("max_running_requests", "max_total_tokens", "context_length")  # of the engine, null until it is up


class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None


class AnswerFormats(TypedDict):
    """How the model spells calls and thinking; null where it has none that is known."""

    tool_calls: str | None
    reasoning: str | None
    evidence: dict[str, str]


SamplingValues = TypedDict(
    "SamplingValues",
    {"source": str, **{number.name: int if number.is_whole else float for number in OF_MODELS}},  # type: ignore[misc]
)
"""Default sampling values of requests, and their source."""


class Texts(TypedDict):
    """How texts become vectors, and what a score is: how likely an answer is, or the cosine of two vectors."""

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    scores: Literal["yes_no", "cosine"]
    evidence: dict[str, str | None]


class ServerInfo(TypedDict):
    served_model_name: str
    model_path: str
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int | None
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None
    version: str
    weight_version: str
    answers: AnswerFormats
    texts: Texts
    sampling: SamplingValues
    settings: list[dict[str, Any]]
    engine: dict[str, Any] | None
    server: dict[str, Any]
    state: dict[str, Any] | None
    may_administer: bool


class Flushed(TypedDict):
    success: Literal[True]
    pools: list[PoolState]


class Checked(TypedDict):
    """By `transport`; `bytes_per_s` is 0 where there was too little to tell. `layout` is the same on both sides but for
    the page size, and `wrong` the columns that hold something else than was sent."""

    num_bytes: int
    bytes_per_s: float
    transport: str
    layout: dict[str, Any]
    wrong: list[str]
