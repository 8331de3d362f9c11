"""Every flag of the engine and the server, declared once.

Names are SGLang's where it has one; the aliases are vLLM's and llama.cpp's spellings of the same setting.
"""

from __future__ import annotations

from typing import Final

from forebay.config import kinds
from forebay.config.elsewhere import ABSENT_DTYPES, ABSENT_KV_DTYPES, ABSENT_QUANTIZATIONS
from forebay.config.engine_config import (
    CacheIsolation,
    EvictionPolicy,
    KernelBackend,
    Ledger,
    SchedulePolicy,
)
from forebay.config.flag import AUTO, BOOL, BYTES, COUNT, FLOAT, FRACTION, LIST, PATH, SECONDS, SECRET, TEXT, Flag
from forebay.formats.quantized import Quantization

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
MAX_TOKENS: Final = 1 << 31
MAX_COUNT: Final = 1 << 20  # that a limit of the server can be set to

MODEL: Final = "model"
MEMORY: Final = "memory and compute"
SCHEDULING: Final = "scheduling"
CACHE: Final = "prefix cache"
HTTP: Final = "http"
SECURITY: Final = "security"
LIMITS: Final = "limits of the http server"
LOGGING: Final = "logging and checks"
SERVER_GROUPS: Final = (HTTP, SECURITY, LIMITS)  # an engine without a server has no use for these

_MODEL: Final = (
    Flag(
        name="model_path",
        kind=PATH,
        default=AUTO,
        group=MODEL,
        aliases=("--model", "-m"),
        help="a folder with config.json and *.safetensors, one .gguf file, or a name from `forebay models list`",
    ),
    Flag(
        name="served_model_name",
        kind=TEXT,
        default=AUTO,
        group=MODEL,
        aliases=("--alias", "-a"),
        help="the model's name in the API",
    ),
    Flag(
        name="chat_template",
        kind=PATH,
        default=AUTO,
        group=MODEL,
        aliases=("--chat-template-file",),
        help="a Jinja file to use instead of the checkpoint's chat template",
    ),
    Flag(
        name="context_length",
        kind=COUNT,
        default=AUTO,
        group=MODEL,
        low=8,
        high=MAX_TOKENS,
        aliases=("--max-model-len", "--ctx-size", "-c", "--max-seq-len-override"),
        help="most tokens of one request, prompt and output together",
    ),
    Flag(
        name="dtype",
        kind=TEXT,
        default=AUTO,
        group=MODEL,
        choices=("bfloat16", "float32"),
        absent=ABSENT_DTYPES,
        help="type of weights, activations and convolution states",
    ),
    Flag(
        name="quantization",
        kind=TEXT,
        default=AUTO,
        group=MODEL,
        choices=tuple(Quantization),
        absent=ABSENT_QUANTIZATIONS,
        aliases=("-q",),
        help="how matrices are held: in the file's codes, in --dtype (none), or rounded to 8 or 4 bits by groups of 32",
    ),
)

_MEMORY: Final = (
    Flag(
        name="mem_fraction_static",
        kind=FRACTION,
        default=AUTO,
        group=MEMORY,
        low=0.01,
        high=0.95,
        aliases=("--gpu-memory-utilization", "--memory-ratio"),
        help="share of the available memory for weights and caches, such as 0.5 or 50%",
    ),
    Flag(
        name="kv_cache_bytes",
        kind=BYTES,
        default=AUTO,
        group=MEMORY,
        low=1 << 16,
        aliases=("--kv-cache-memory-bytes", "--kv-cache-memory"),
        help="size of all caches together (KV, windows, states), such as 4GiB",
    ),
    Flag(
        name="max_total_tokens",
        kind=COUNT,
        default=AUTO,
        group=MEMORY,
        low=16,
        high=MAX_TOKENS,
        help="most tokens in the KV cache, whatever the memory allows",
    ),
    Flag(
        name="page_size",
        kind=COUNT,
        default=AUTO,
        group=MEMORY,
        low=1,
        high=1024,
        aliases=("--block-size",),
        help="tokens in one page of the KV cache",
    ),
    Flag(
        name="device",
        kind=TEXT,
        default=AUTO,
        group=MEMORY,
        choices=("cpu", "cuda"),
        help="where the model runs",
    ),
    Flag(
        name="num_threads",
        kind=COUNT,
        default=AUTO,
        group=MEMORY,
        low=1,
        high=1024,
        aliases=("--threads", "-t"),
        help="threads that compute",
    ),
    Flag(
        name="kernels",
        kind=TEXT,
        default=AUTO,
        group=MEMORY,
        choices=tuple(KernelBackend),
        help="native: compiled for this machine's CPU; amx, avx512bf16, avx512vnni, avx512, avx2vnni, avx2: for these "
        "instructions of it; torch: the reference; triton: for NVIDIA GPUs",
    ),
)

_KV: Final = (
    Flag(
        name="kv_cache_dtype",
        kind=TEXT,
        default=AUTO,
        group=MEMORY,
        choices=("bfloat16", "float32", "int8"),
        absent=ABSENT_KV_DTYPES,
        help="type of keys and values, not larger than --dtype; int8 has a scale per token and head",
    ),
)

_SCHEDULING: Final = (
    Flag(
        name="max_running_requests",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=1,
        high=65536,
        aliases=("--max-num-seqs", "--parallel", "-np"),
        help="most requests that run at once",
    ),
    Flag(
        name="chunked_prefill_size",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=1,
        high=MAX_TOKENS,
        aliases=("--max-num-batched-tokens", "--ubatch-size", "-ub", "--max-prefill-length"),
        help="most prompt tokens in one step",
    ),
    Flag(
        name="mixed_chunk_size",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=1,
        high=MAX_TOKENS,
        aliases=("--long-prefill-token-threshold",),
        help="most prompt tokens in a step in which others decode: what they wait for between two tokens",
    ),
    Flag(
        name="schedule_policy",
        kind=TEXT,
        default=SchedulePolicy.FCFS.value,
        group=SCHEDULING,
        choices=tuple(SchedulePolicy),
        aliases=("--scheduling-policy",),
        help="who is admitted first: arrival, longest cached prefix, or priority",
    ),
    Flag(
        name="schedule_conservativeness",
        kind=FLOAT,
        default=1.0,
        group=SCHEDULING,
        low=0.0,
        high=10.0,
        help="above 1 admits fewer at once, below 1 more (and retracts more)",
    ),
    Flag(
        name="overlap_depth",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=0,
        high=1,
        help="steps in flight while the host plans the next: 0 or 1",
    ),
    Flag(
        name="disable_cuda_graph",
        kind=BOOL,
        default=False,
        group=SCHEDULING,
        aliases=("--enforce-eager",),
        help="run steps by their Python instead of replaying graphs, on a CPU too: for finding faults",
    ),
    Flag(
        name="cuda_graph_max_bs",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=1,
        high=65536,
        aliases=("--max-cudagraph-capture-size",),
        help="the largest decode batch that is captured as a graph, on a CPU too",
    ),
    Flag(
        name="max_queued_requests",
        kind=COUNT,
        default=256,
        group=SCHEDULING,
        low=1,
        high=1 << 20,
        help="most waiting requests; more are answered 429",
    ),
    Flag(
        name="max_queued_tokens",
        kind=COUNT,
        default=AUTO,
        group=SCHEDULING,
        low=1,
        high=MAX_TOKENS,
        help="most prompt tokens that wait",
    ),
    Flag(
        name="queue_timeout",
        kind=SECONDS,
        default=60.0,
        group=SCHEDULING,
        low=0.01,
        unit="s",
        help="longest wait for a first step",
    ),
    Flag(
        name="request_timeout",
        kind=SECONDS,
        default=600.0,
        group=SCHEDULING,
        low=0.01,
        unit="s",
        aliases=("--timeout",),
        help="longest life of a request",
    ),
    Flag(
        name="stall_timeout",
        kind=SECONDS,
        default=60.0,
        group=SCHEDULING,
        low=0.01,
        unit="s",
        help="longest time of a running request without a token",
    ),
)

_CACHE: Final = (
    Flag(
        name="disable_radix_cache",
        kind=BOOL,
        default=False,
        group=CACHE,
        aliases=("--no-enable-prefix-caching", "--no-cache-prompt", "--no-prefix-cache"),
        help="compute every prompt anew",
    ),
    Flag(
        name="radix_eviction_policy",
        kind=TEXT,
        default=EvictionPolicy.LRU.value,
        group=CACHE,
        choices=tuple(EvictionPolicy),
        help="which cached prefix goes first",
    ),
)

_HTTP: Final = (
    Flag(name="host", kind=TEXT, default="127.0.0.1", group=HTTP, help="address to listen on"),
    Flag(name="port", kind=COUNT, default=30000, group=HTTP, low=0, high=65535, help="port to listen on, 0 for any"),
    Flag(
        name="cors_origins",
        kind=LIST,
        default=(),
        group=HTTP,
        aliases=("--cors-origin", "--allowed-origins"),
        help="origins whose pages may call the API",
    ),
    Flag(
        name="drain_timeout",
        kind=SECONDS,
        default=30.0,
        group=HTTP,
        low=0.0,
        unit="s",
        help="time that running requests get after SIGTERM",
    ),
)

_SECURITY: Final = (
    Flag(name="api_key_file", kind=PATH, default=AUTO, group=SECURITY, help="a file with one API key per line"),
    Flag(
        name="api_key",
        kind=SECRET,
        default=AUTO,
        group=SECURITY,
        help="one API key; as a flag it is visible in the process list, so prefer the file",
    ),
    Flag(
        name="admin_api_key_file",
        kind=PATH,
        default=AUTO,
        group=SECURITY,
        help="a file with one key per line for the admin routes, which are absent without one",
    ),
    Flag(name="admin_api_key", kind=SECRET, default=AUTO, group=SECURITY, help="one key for the admin routes"),
    Flag(
        name="allowed_hosts",
        kind=LIST,
        default=(),
        group=SECURITY,
        aliases=("--allowed-host",),
        help="names under which the server is reached, besides localhost and --host",
    ),
    Flag(
        name="cache_isolation",
        kind=TEXT,
        default=AUTO,
        group=SECURITY,
        choices=tuple(CacheIsolation),
        help="who shares cached prefixes, and so learns from hits what others have sent: everybody (none), those with "
        "the same API key, or of those the same `user`",
    ),
)


def _seconds(name: str, default: float, help: str) -> Flag:
    return Flag(name=name, kind=SECONDS, default=default, group=LIMITS, low=0.05, unit="s", help=help)


def _count(name: str, default: int, help: str, high: int = MAX_COUNT) -> Flag:
    return Flag(name=name, kind=COUNT, default=default, group=LIMITS, low=1, high=high, help=help)


_LIMITS: Final = (
    Flag(
        name="max_body_bytes",
        kind=BYTES,
        default=4 << 20,
        group=LIMITS,
        low=1024,
        high=64 << 20,
        help="largest body of a request",
    ),
    Flag(
        name="max_header_bytes",
        kind=BYTES,
        default=16 << 10,
        group=LIMITS,
        low=1024,
        high=1 << 20,
        help="all headers of a request together",
    ),
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

_LOGGING: Final = (
    Flag(
        name="log_level",
        kind=TEXT,
        default="info",
        group=LOGGING,
        choices=LOG_LEVELS,
        help="least important messages that are shown",
    ),
    Flag(
        name="ledger",
        kind=TEXT,
        default=Ledger.COUNT.value,
        group=LOGGING,
        choices=tuple(Ledger),
        help="what the pools do about a double free or a leak",
    ),
)

FLAGS: Final = (*_MODEL, *_MEMORY, *_KV, *kinds.FLAGS, *_SCHEDULING, *_CACHE, *_HTTP, *_SECURITY, *_LIMITS, *_LOGGING)
BY_NAME: Final = {flag.name: flag for flag in FLAGS}

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"  # `--config`: the file itself is no setting of it
