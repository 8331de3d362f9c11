"""The shapes of answers in the dialects of llama-server and Ollama, and the descriptions of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypedDict


class LlamaError(TypedDict):
    code: int
    message: str
    type: str
    param: str | None


class LlamaErrorAnswer(TypedDict):
    error: LlamaError


class LlamaTimings(TypedDict):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class LlamaToken(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: NotRequired[list[dict[str, Any]]]


class LlamaCompletion(TypedDict):
    index: int
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[LlamaToken]]
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["eos", "word", "limit", "none"]
    stopping_word: str
    tokens_cached: int
    timings: NotRequired[LlamaTimings]


class TemplateText(TypedDict):
    prompt: str


class DefaultSettings(TypedDict):
    n_ctx: int
    params: dict[str, Any]


class Modalities(TypedDict):
    vision: Literal[False]
    audio: Literal[False]


class Props(TypedDict):
    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    """A place for one request; which request it is, and its text, is not shown."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class OllamaError(TypedDict):
    error: str


class OllamaFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class OllamaCalled(TypedDict):
    function: OllamaFunction


class OllamaSaid(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCalled]]


class OllamaAnswer(TypedDict):
    """Counts and durations are in the last line of a stream; a request that generates nothing has none."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[dict[str, Any]]]


class OllamaChat(OllamaAnswer):
    message: OllamaSaid


class OllamaGenerated(OllamaAnswer):
    response: str
    thinking: NotRequired[str]


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaDetails(TypedDict):
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    details: OllamaDetails


class OllamaTags(TypedDict):
    models: list[OllamaModel]


class OllamaShown(TypedDict):
    modified_at: str
    template: str
    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]


class OllamaVersion(TypedDict):
    version: str


ROUTES: Final[Mapping[str, str]] = {
    "/completion": "Go on with a prompt, in llama-server's form.",
    "/apply-template": "The text that the chat template makes of a conversation.",
    "/props": "Sampling defaults, context and chat template, as llama-server's clients ask for them.",
    "/slots": "How many requests run of those that may; nothing of what they say.",
    "/api/chat": "Answer a conversation, in Ollama's form; streams unless told not to.",
    "/api/generate": "Answer a prompt, in Ollama's form; streams unless told not to.",
    "/api/embed": "The vectors of texts, in Ollama's form.",
    "/api/show": "The model's template, limits and abilities, as Ollama's clients ask for them.",
    "/api/tags": "The one model that is served, as Ollama's clients ask for it.",
    "/api/version": "Forebay's version, as Ollama's clients ask for it.",
}

FIELDS: Final[Mapping[str, str]] = {
    "add_special": "Whether the tokenizer's own tokens are put around `content`.",
    "audio": "Always false.",
    "bos_token": "The text of the token that begins a text.",
    "build_info": "Forebay's version.",
    "cache_n": "Prompt tokens that came from the prefix cache.",
    "capabilities": "What the model can do.",
    "chat_template": "The Jinja text that makes a prompt of a conversation.",
    "completion_probabilities": "The log-probability of each token, with `n_probs` alternatives.",
    "default_generation_settings": "What holds for requests that say nothing.",
    "details": "What kind of model it is.",
    "done": "Whether this is the last line.",
    "done_reason": "Why the answer ended; `load` where nothing was asked for.",
    "embeddings": "A vector for each text.",
    "eos_token": "The text of the token that ends an answer.",
    "eval_count": "Tokens of the answer.",
    "eval_duration": "Nanoseconds from the answer's first token to its last.",
    "families": "The same in a list.",
    "family": "The model's type, as its configuration names it.",
    "generation_settings": "The sampling values that held.",
    "has_new_line": "Whether the answer has more than one line.",
    "is_processing": "Whether a request runs in it.",
    "load_duration": "Always 0: the model was loaded before.",
    "images": "Only an empty list: images are not served.",
    "modalities": "What a prompt may hold beside text.",
    "model_alias": "The model's name in requests.",
    "model_info": "The model's numbers, by GGUF's names.",
    "models": "The one that is served.",
    "modified_at": "When the server started.",
    "n_ctx": "The context's length in tokens.",
    "n_probs": "Of how many tokens besides the chosen one log-probabilities are told.",
    "num_predict": "The most tokens of the answer; -1 as many as there is room for.",
    "options": "Sampling values.",
    "params": "Sampling values.",
    "predicted_ms": "Milliseconds from the answer's first token to its last.",
    "predicted_n": "Tokens of the answer.",
    "predicted_per_second": "Tokens of the answer per second; null where nothing was measured.",
    "predicted_per_token_ms": "Milliseconds per token of the answer; null where nothing was measured.",
    "prompt_eval_count": "Tokens of the prompt.",
    "prompt_eval_duration": "Nanoseconds from the request's arrival to the first token, with its wait.",
    "prompt_ms": "Milliseconds from the request's arrival to the first token, with its wait.",
    "prompt_n": "Prompt tokens that were computed.",
    "prompt_per_second": "Computed prompt tokens per second; null where there were none.",
    "prompt_per_token_ms": "Milliseconds per computed prompt token; null where there were none.",
    "raw": "Whether the prompt goes through no template.",
    "repeat_last_n": "Only -1, all tokens, where there is a penalty.",
    "repeat_penalty": "Above 1 makes tokens of the prompt and the answer less likely.",
    "response": "The text.",
    "return_tokens": "Whether the answer has token ids, too.",
    "size": "Bytes of the weights in memory.",
    "speculative": "Whether tokens are guessed ahead.",
    "stop_type": "Why the answer ended: an end token, a stop text, the limit.",
    "stopping_word": "The stop text that ended the answer.",
    "template": "The Jinja text that makes a prompt of a conversation.",
    "think": "Whether the model is to think, or how much.",
    "timings": "How long it took.",
    "timings_per_token": "Whether each event of a stream says how long it took.",
    "tokens_cached": "Prompt tokens that came from the prefix cache.",
    "tokens_evaluated": "Tokens of the prompt.",
    "tokens_predicted": "Tokens of the answer.",
    "tool_name": "The tool whose result this is.",
    "total_duration": "Nanoseconds from the request's arrival to the end of the answer.",
    "total_slots": "How many requests may run at once.",
    "truncated": "Always false: prompts are never cut.",
    "vision": "Always false.",
    "with_pieces": "Whether each token comes with its text.",
}

OF: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaError": {"code": "The status.", "type": "The kind of error, in llama-server's words."},
    "OllamaShown": {"parameters": "The default sampling values, a line each."},
    "OllamaChat": {"created_at": "When the request came."},
    "OllamaGenerated": {"created_at": "When the request came."},
    "OllamaDetails": {"format": "The kind of the model's files."},
    "LlamaCompletion": {"stop": "Whether this is the end of the answer.", "tokens": "Token ids, if asked for."},
}
