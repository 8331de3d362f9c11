"""Every flag of the engine and the server, declared once.

Names are SGLang's if it has one; the aliases are vLLM's and llama.cpp's spellings of the same setting.
"""

from __future__ import annotations

from typing import Final

from forebay.backends import BACKENDS, kernels_by_description
from forebay.base.foreign import ABSENT_VALUES, SYNONYMS
from forebay.base.log import LogFormat
from forebay.config import (
    adapters,
    disaggregation,
    hisparse,
    kinds,
    media,
    pictures,
    ranks,
    sampling,
    speculation,
    tiers,
)
from forebay.config.engine_config import (
    MAX_PAGE_SIZE,
    ActivationDtype,
    CacheIsolation,
    EvictionPolicy,
    Exact,
    Ledger,
    SchedulePolicy,
)
from forebay.config.flag import BOOL, BYTES, COUNT, FLOAT, FRACTION, LIST, PATH, SECONDS, SECRET, TEXT, Flag, in_group
from forebay.families.base.embedding import POOLINGS
from forebay.formats.quantization import Quantization

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
MAX_TOKENS: Final = 1 << 31
MAX_COUNT: Final = 1 << 20  # that a limit of the server can be set to

MODEL: Final = "model"
MEMORY: Final = "memory and compute"
SCHEDULING: Final = "scheduling"
CACHE: Final = "prefix cache"
SLEEP: Final = "sleep"
HTTP: Final = "http"
SECURITY: Final = "security"
LIMITS: Final = "limits of the http server"
LOGGING: Final = "logging and checks"
SERVER_GROUPS: Final = (HTTP, SECURITY, LIMITS, sampling.GROUP)  # an engine without a server has no use for these

_MODEL: Final = in_group(
    MODEL,
    Flag(
        "model_path",
        PATH,
        "org/name of the Hugging Face hub (org/name:Q4_K_M for a GGUF file of it), a folder with config.json and "
        "*.safetensors, a .gguf file (any of its parts), or a name from `forebay models list`",
        aliases=("--model", "-m", "-hf", "-hfr", "--hf-repo"),
    ),
    Flag("revision", TEXT, "branch, tag or commit of a model of the hub"),
    Flag("served_model_name", TEXT, "the model's name in the API", aliases=("--alias", "-a")),
    Flag(
        "chat_template",
        PATH,
        "a Jinja file to use instead of the checkpoint's chat template",
        aliases=("--chat-template-file",),
    ),
    Flag(
        "sampling_defaults",
        TEXT,
        "what requests that do not say are sampled with: the model's own values (of generation_config.json or the GGUF "
        "file, where it has any), or OpenAI's defaults: temperature 1, all tokens",
        default="model",
        choices=("model", "openai"),
    ),
    Flag(
        "context_length",
        COUNT,
        "most tokens of one request, prompt and output together",
        aliases=("--max-model-len", "--ctx-size", "-c", "--max-seq-len-override"),
        also_auto=("0", "-1"),
        low=8,
        high=MAX_TOKENS,
    ),
    Flag(
        "dtype",
        TEXT,
        "type of weights, activations and convolution states",
        choices=("bfloat16", "float32"),
        absent=ABSENT_VALUES["dtype"],
    ),
    Flag(
        "quantization",
        TEXT,
        "how matrices are held: in the file's codes, in --dtype (none), or rounded to 8 or 4 bits by groups of 32",
        aliases=("-q",),
        choices=tuple(Quantization),
        absent=ABSENT_VALUES["quantization"],
    ),
    Flag(
        "pooling",
        TEXT,
        "what of a text's tokens is its embedding: the last one's hidden state, the mean of all, or the first one's",
        aliases=("--pooling-type",),
        choices=POOLINGS,
    ),
)

_MEMORY: Final = in_group(
    MEMORY,
    Flag(
        "mem_fraction_static",
        FRACTION,
        "share of the available memory for weights and caches, such as 0.5 or 50%",
        aliases=("--gpu-memory-utilization", "--memory-ratio"),
        low=0.01,
        high=0.95,
    ),
    Flag(
        "kv_cache_bytes",
        BYTES,
        "size of all caches together (KV, windows, states), such as 4GiB",
        aliases=("--kv-cache-memory-bytes", "--kv-cache-memory"),
        low=1 << 16,
    ),
    Flag("max_total_tokens", COUNT, "most tokens in the KV cache, whatever the memory allows", low=16, high=MAX_TOKENS),
    Flag(
        "page_size", COUNT, "tokens in one page of the KV cache", aliases=("--block-size",), low=1, high=MAX_PAGE_SIZE
    ),
    Flag("device", TEXT, "where the model runs", choices=("cpu", "cuda")),
    Flag("num_threads", COUNT, "threads that compute", aliases=("--threads", "-t"), low=1, high=1024),
    Flag(
        "kernels",
        TEXT,
        "; ".join(f"{', '.join(names)}: {about}" for about, names in kernels_by_description().items()),
        choices=tuple(BACKENDS),
    ),
    Flag(
        "activation_bits",
        COUNT,
        "16 or 8: bits that inputs of weights in codes are rounded to, by groups of 32, where the CPU has no AMX; 8 is "
        "faster for many tokens and changes answers a little: the default where most weights have up to 6 bits",
        low=8,
        high=16,
    ),
    Flag(
        "activation_dtype",
        TEXT,
        "fp8: on a GPU round inputs of weights in FP8 to FP8, by groups of 128; it changes answers",
        choices=tuple(ActivationDtype),
        default=ActivationDtype.MODEL,
    ),
    Flag(
        "exact",
        TEXT,
        "off: on a GPU take the fastest products, though tokens may then depend on the other requests of a step",
        choices=tuple(Exact),
        default=Exact.ON,
    ),
    Flag("weights_cache_bytes", BYTES, "most bytes of all files of packed weights, which starts map; 0: none", low=0),
    *pictures.FLAGS,
    Flag("verify_weights_cache", BOOL, "check all bytes of such a file before a start maps it", default=False),
    Flag(
        "kv_cache_dtype",
        TEXT,
        "type of keys and values, not larger than --dtype; int8, and fp8 on a GPU, have a scale per token and head",
        aliases=("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
        choices=("bfloat16", "float32", "int8", "fp8"),
        synonyms=SYNONYMS["kv_cache_dtype"],
        absent=ABSENT_VALUES["kv_cache_dtype"],
    ),
)

_SCHEDULING: Final = in_group(
    SCHEDULING,
    Flag(
        "max_running_requests",
        COUNT,
        "most requests that run at once",
        aliases=("--max-num-seqs", "--parallel", "-np"),
        low=1,
        high=65536,
    ),
    Flag(
        "chunked_prefill_size",
        COUNT,
        "most prompt tokens in one step",
        aliases=("--max-num-batched-tokens", "--ubatch-size", "-ub", "--max-prefill-length"),
        low=1,
        high=MAX_TOKENS,
    ),
    Flag(
        "mixed_chunk_size",
        COUNT,
        "most prompt tokens in a step in which others decode: what they wait for between two tokens",
        aliases=("--long-prefill-token-threshold",),
        low=1,
        high=MAX_TOKENS,
    ),
    Flag(
        *("max_step_ms", FLOAT, "longest step in which others decode, by cutting its prompt; 0: two decode steps"),
        low=0.0,
    ),
    Flag(
        "schedule_policy",
        TEXT,
        "who is admitted first: arrival, longest cached prefix, or priority",
        default=SchedulePolicy.FCFS.value,
        aliases=("--scheduling-policy",),
        choices=tuple(SchedulePolicy),
    ),
    Flag(
        *("schedule_conservativeness", FLOAT, "above 1 admits fewer at once, below 1 more (and retracts more)"),
        default=1.0,
        low=0.0,
        high=10.0,
    ),
    Flag("overlap_depth", COUNT, "steps in flight while the host plans the next: 0 or 1", low=0, high=1),
    Flag(
        "disable_cuda_graph",
        BOOL,
        "run steps by their Python instead of replaying graphs, on a CPU too: for finding faults",
        default=False,
        aliases=("--enforce-eager",),
    ),
    Flag(
        "cuda_graph_max_bs",
        COUNT,
        "the largest decode batch that is captured as a graph, on a CPU too",
        aliases=("--max-cudagraph-capture-size",),
        low=1,
        high=65536,
    ),
    Flag(
        "max_queued_requests", COUNT, "most waiting requests; more are answered 429", default=256, low=1, high=1 << 20
    ),
    Flag("max_queued_tokens", COUNT, "most prompt tokens that wait", low=1, high=MAX_TOKENS),
    Flag("queue_timeout", SECONDS, "longest wait for a first step", default=60.0, low=0.01),
    Flag(
        "request_timeout",
        SECONDS,
        "longest life of a request",
        default=600.0,
        aliases=("--timeout", "-to"),
        low=0.01,
    ),
    Flag("stall_timeout", SECONDS, "longest time of a running request without a token", default=60.0, low=0.01),
)

_SLEEP: Final = in_group(
    SLEEP,
    Flag(
        "enable_memory_saver",
        BOOL,
        "let a GPU's memory be released, by torch-memory-saver (a CPU's always can)",
        default=False,
    ),
    Flag(
        "weights_cpu_backup",
        BOOL,
        "keep a GPU's weights in pinned host memory while they are released (a CPU reads them again)",
        default=False,
    ),
    Flag(
        "sleep_idle_seconds",
        FLOAT,
        "seconds without a request after which the engine gives its memory back; a request wakes it (0: never)",
        default=0.0,
        low=0.0,
    ),
    Flag(
        "wake_on_request",
        BOOL,
        "a request that arrives wakes an engine that is asleep, instead of waiting for it",
        default=False,
    ),
    Flag(
        "keep_prefix_cache",
        BOOL,
        "cached prompts outlast a sleep in host memory, as many as fit into --retraction-host-bytes",
        default=False,
    ),
)

_CACHE: Final = in_group(
    CACHE,
    Flag(
        "disable_radix_cache",
        BOOL,
        "compute every prompt anew",
        aliases=("--no-enable-prefix-caching", "--no-cache-prompt", "--no-prefix-cache"),
    ),
    Flag(
        "radix_eviction_policy",
        TEXT,
        "which cached prefix goes first",
        default=EvictionPolicy.LRU.value,
        choices=tuple(EvictionPolicy),
    ),
    Flag(
        "pinned_cache_fraction",
        FRACTION,
        "part of each cache pool for prefixes that clients want kept (cache_control, prompt_cache_retention)",
        default=0.25,
        low=0.0,
        high=1.0,
    ),
)

_HTTP: Final = in_group(
    HTTP,
    Flag("host", TEXT, "address to listen on", default="127.0.0.1"),
    Flag("port", COUNT, "port to listen on, 0 for any", default=30000, low=0, high=65535),
    Flag(
        "cors_origins",
        LIST,
        "origins whose pages may call the API",
        default=(),
        aliases=("--cors-origin", "--allowed-origins"),
    ),
    Flag(
        "tool_call_parser",
        TEXT,
        "how the model spells calls of tools: auto (as its chat template does), none, or a format's name",
        default="auto",
    ),
    Flag(
        "reasoning_parser",
        TEXT,
        "how the model marks its thinking: auto (as its chat template does), none, or a format's name",
        default="auto",
    ),
    Flag(
        "unknown_fields",
        TEXT,
        "fields of requests that nobody here knows: refuse, or pass them over and warn in x-forebay-ignored; those "
        "known to change an answer are refused either way",
        default="refuse",
        choices=("refuse", "warn"),
    ),
    Flag("report", BOOL, "print the whole table of memory, model and settings once the server is ready", default=False),
    Flag("drain_timeout", SECONDS, "time that running requests get after SIGTERM", default=30.0, low=0.0),
    Flag(
        "keep_volatile_headers",
        BOOL,
        "leave the billing line that changes with every request at the head of a system text (/v1/messages), where it "
        "keeps the prefix cache from finding anything, instead of moving it behind that text",
        default=False,
    ),
    Flag(
        "metrics_compat",
        TEXT,
        "under whose names /metrics has its series once more, for dashboards that are there already",
        default="none",
        choices=("none", "vllm", "sglang"),
    ),
    Flag(
        "otlp_traces_endpoint",
        TEXT,
        "collector that gets traces by OTLP over HTTP, such as http://127.0.0.1:4318 (needs forebay[otel])",
        default="",
    ),
    Flag("trace_ratio", FRACTION, "part of the requests without a caller's trace that is traced", default=0.01),
    Flag(
        "kv_events",
        TEXT,
        "where routers subscribe to events of the prefix cache, such as tcp://127.0.0.1:5557 (needs "
        "forebay[kv-events])",
        default="",
    ),
    Flag(
        "kv_events_replay",
        TEXT,
        "where subscribers of --kv-events get events again that they have missed, such as tcp://127.0.0.1:5558",
        default="",
    ),
    Flag(
        "kv_events_tokens",
        BOOL,
        "put the ids of cached tokens into --kv-events, which reveal prompts; on 127.0.0.1 they are there without it, "
        "if there is one API key at most",
        default=False,
    ),
)

_SECURITY: Final = in_group(
    SECURITY,
    Flag("api_key_file", PATH, "a file with one API key per line"),
    Flag("api_key", SECRET, "one API key; as a flag it is visible in the process list, so prefer the file"),
    Flag("admin_api_key_file", PATH, "a file with one key per line for the admin routes, which are absent without one"),
    Flag("admin_api_key", SECRET, "one key for the admin routes"),
    Flag("weights_root", PATH, "a folder below which /update_weights_from_disk may read; without it nowhere"),
    Flag("lora_root", PATH, "a folder below which /load_lora_adapter may read; without it nowhere"),
    Flag(
        "allowed_hosts",
        LIST,
        "names under which the server is reached, besides localhost and --host",
        default=(),
        aliases=("--allowed-host",),
    ),
    Flag(
        "cache_isolation",
        TEXT,
        "who shares cached prefixes, and so learns from hits what others have sent: everybody (none), those with the "
        "same API key, or of those the same `user`",
        choices=tuple(CacheIsolation),
    ),
    *media.SECURITY_FLAGS,
)


def _seconds(name: str, default: float, help: str) -> Flag:
    return Flag(name, SECONDS, help, default=default, low=0.05)


def _count(name: str, default: int, help: str, high: int = MAX_COUNT) -> Flag:
    return Flag(name, COUNT, help, default=default, low=1, high=high)


_LIMITS: Final = in_group(
    LIMITS,
    Flag("responses_store_bytes", BYTES, "stored responses of each API key; 0: store none", default=0, high=64 << 30),
    Flag("max_body_bytes", BYTES, "largest body of a request", low=1024, high=64 << 20),
    *media.LIMIT_FLAGS,
    Flag("max_header_bytes", BYTES, "all headers of a request together", default=16 << 10, low=1024, high=1 << 20),
    _count("max_headers", 64, "most headers of a request"),
    _seconds("header_timeout", 10.0, "time for a request's headers to arrive"),
    _seconds("body_timeout", 30.0, "time for a request's body to arrive"),
    _seconds("keep_alive", 15.0, "time an idle connection is kept"),
    _seconds("write_timeout", 30.0, "time for a client to take what was sent"),
    _count("max_connections", 1024, "most open connections"),
    _count("max_stream_chunks", 256, "chunks kept for a slow client before it is cut off"),
    _count("max_n", 8, "most choices of one request (n)"),
    _count("max_prompts", 16, "most prompts of one completion request", high=1 << 14),  # a body of more is not read
)

_LOGGING: Final = in_group(
    LOGGING,
    Flag("log_level", TEXT, "least important messages that are shown", default="info", choices=LOG_LEVELS),
    Flag(
        "log_format", TEXT, "how lines of the log are written", default=LogFormat.TEXT.value, choices=tuple(LogFormat)
    ),
    Flag(
        "ledger", TEXT, "what pools do about a double free or a leak", default=Ledger.COUNT.value, choices=tuple(Ledger)
    ),
    Flag(
        "flight_recorder",
        BYTES,
        "memory for the latest inputs of the scheduler, which are written to a file if the engine fails; off: none",
        default=16 << 20,
        low=1 << 20,
        high=64 << 30,
        off=0,
        synonyms={"off": "0"},
    ),
    Flag("record_tokens", BOOL, "write tokens into files of the flight recorder, instead of hashes", default=False),
)

FLAGS: Final = (
    *_MODEL,
    *in_group(MODEL, pictures.MMPROJ),
    *_MEMORY,
    *kinds.FLAGS,
    *tiers.FLAGS,
    *hisparse.FLAGS,
    *adapters.FLAGS,
    *ranks.FLAGS,
    *_SCHEDULING,
    *speculation.FLAGS,
    *_CACHE,
    *sampling.FLAGS,
    *disaggregation.FLAGS,
    *_HTTP,
    *_SECURITY,
    *_LIMITS,
    *_SLEEP,
    *_LOGGING,
)
BY_NAME: Final = {flag.name: flag for flag in FLAGS}

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"  # `--config`: the file itself is no setting of it
