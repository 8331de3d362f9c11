"""The resolved configuration. Nothing below reads flags, the environment or files, and nothing here is "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Ledger(StrEnum):
    """What a pool does about a double free, a free of somebody else's slot, or a leak (C8)."""

    OFF = "off"
    COUNT = "count"  # log, count, quarantine, go on
    RAISE = "raise"


class SchedulePolicy(StrEnum):
    FCFS = "fcfs"
    LPM = "lpm"  # longest prefix match first
    PRIORITY = "priority"  # higher number first, then fcfs


class EvictionPolicy(StrEnum):
    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"


class KernelBackend(StrEnum):
    NATIVE = "native"  # our C++ kernels
    TORCH = "torch"  # the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits are in requests, tokens, pages and seconds, as named."""

    page_size: int = 16
    num_pages: int
    max_running_requests: int
    context_length: int
    chunked_prefill_size: int = 2048  # most tokens of prompts in one step
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    schedule_conservativeness: float = 1.0
    radix_cache: bool = True
    radix_eviction_policy: EvictionPolicy = EvictionPolicy.LRU
    overlap_depth: int = 0
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    ledger: Ledger = Ledger.COUNT


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine process needs. Memory is divided by `memory.budget` from `kv_cache_bytes` and the checkpoint's
    shape before weights are loaded; `max_total_tokens` and `max_running_requests` are upper limits to that division.
    """

    model_path: str  # a folder with config.json and *.safetensors, or one .gguf file
    served_model_name: str
    dtype: str  # bfloat16 | float32: weights, activations and KV
    device: str
    num_threads: int
    kernels: KernelBackend
    context_length: int
    page_size: int
    max_running_requests: int
    max_total_tokens: int
    kv_cache_bytes: int
    chunked_prefill_size: int
    schedule_policy: SchedulePolicy
    schedule_conservativeness: float
    radix_cache: bool
    radix_eviction_policy: EvictionPolicy
    overlap_depth: int
    max_queued_requests: int
    max_queued_tokens: int
    queue_timeout_s: float
    request_timeout_s: float
    stall_timeout_s: float
    ledger: Ledger
    log_level: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What the server process needs. Limits as `docs/design.md` lists them; sizes in bytes, times in seconds."""

    host: str
    port: int
    api_keys: tuple[str, ...]
    admin_api_keys: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 64
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    write_timeout_s: float = 30.0
    max_connections: int = 1024
    max_stream_chunks: int = 256
    max_n: int = 8
    max_prompts: int = 16
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    chat_template: str | None = None  # the operator's own, instead of the checkpoint's


class Setting(msgspec.Struct, frozen=True):
    """One effective value, who set it (`default`, `file`, `env`, `flag`, `rule`) and why; /server_info shows them."""

    name: str
    value: str
    source: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything `resolve` decided."""

    engine: EngineConfig
    server: ServerConfig
    settings: tuple[Setting, ...]
