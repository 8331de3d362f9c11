"""The resolved configuration of a whole server: its own settings, its engine's, and the source of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from forebay.config.engine_config import CacheIsolation, EngineConfig
from forebay.config.media import MediaOptions
from forebay.families.base.sampling import NEUTRAL, SamplingDefaults

SETTINGS: Final = "settings"  # section of a start report with settings that the division of memory decided


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(MediaOptions):
    """Settings of the server process. Sizes are in bytes, times in seconds."""

    host: str
    port: int
    api_keys: tuple[str, ...] = field(repr=False)
    admin_api_keys: tuple[str, ...] = field(repr=False)
    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]
    cache_isolation: CacheIsolation = CacheIsolation.KEY
    prefix_cache_dir: str = ""  # which has the secret of the namespaces; "": they end with this process
    max_body_bytes: int = 4 << 20
    responses_store_bytes: int = 0  # for each API key; 0 stores no responses
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
    keep_volatile_headers: bool = False  # at the head of system texts
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str = ""  # of a collector; empty: nothing is traced
    trace_ratio: float = 0.01  # of requests whose callers have no trace
    kv_events: str = ""  # where routers subscribe to events of the prefix cache; empty: there are none
    kv_events_replay: str = ""  # where they get again what they have missed; empty: nowhere
    report: bool = False  # print the whole table at the start
    chat_template: str | None = None  # the operator's own, instead of the checkpoint's
    tool_call_parser: str = "auto"  # or none, or one of `text.answers.formats`
    reasoning_parser: str = "auto"  # likewise
    metrics_compat: str = "none"  # or vllm, sglang: under whose names /metrics has its series once more
    pooling: str = "last"  # or mean, cls: what becomes of the hidden states of a text's tokens
    weights_root: str | None = None  # below which `/update_weights_from_disk` may read
    lora_root: str | None = None  # below which `/load_lora_adapter` may read
    unknown_fields: str = "refuse"  # or warn: in a header
    sampling: SamplingDefaults = NEUTRAL  # of requests that do not say
    cluster_key: bytes = field(default=b"", repr=False)  # that gateways and servers prove to each other
    insecure_no_cluster_key: bool = False  # with one role on loopback: anybody is a gateway
    prefill_servers: tuple[str, ...] = ()  # HOST:PORT that requests may name without the cluster key
    key_names: Mapping[str, str] = field(default_factory=dict, repr=False)  # by key: the tenant that holds it
    tenants: Mapping[str, int] = field(default_factory=dict)  # their weights, as in `SchedulingOptions`
    receipt_tenants: frozenset[str] = frozenset()  # whose answers have receipts unless a request says otherwise
    pd: str = ""  # local:1p1d: prefill and decode servers behind a router, all of this machine


class Setting(msgspec.Struct, frozen=True):
    """One effective value, its source (`default`, `file`, `env`, `flag`, `rule`) and the reason; /server_info shows
    them."""

    name: str
    value: str
    source: str
    reason: str


def as_divided(settings: Iterable[Setting], report: Iterable[tuple[str, str, str, str]]) -> list[Setting]:
    """Return `settings` with the values that the division of memory gave them: the rows `SETTINGS` of an engine's
    start report."""
    divided = {name: (value, reason) for section, name, value, reason in report if section == SETTINGS}
    return [
        Setting(setting.name, divided[setting.name][0], "rule", divided[setting.name][1])
        if setting.name in divided
        else setting
        for setting in settings
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything `resolve` decided."""

    engine: EngineConfig
    server: ServerConfig
    settings: tuple[Setting, ...]
