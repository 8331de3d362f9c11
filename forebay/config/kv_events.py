"""The check of the settings of events of the prefix cache, and what they become."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import secrets
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from forebay.base.errors import ConfigError
from forebay.base.exposure import is_loopback
from forebay.config.flag import Settled

_PURPOSE: Final = b"hashes of events of the prefix cache"


def field_values(settled: Settled, cluster_key: bytes, *, num_keys: int) -> dict[str, Any]:
    """Return what the engine needs: whether there are events and whether they have token ids, and the key of hashes.
    Without a cluster key each process has a key of its own. Raises ConfigError."""
    publish, replay = str(settled["kv_events"]), str(settled["kv_events_replay"])
    wants_tokens = bool(settled["kv_events_tokens"])
    if not publish:
        for option, given in (("--kv-events-replay", replay), ("--kv-events-tokens", wants_tokens)):
            if given:
                raise ConfigError(f"{option} has no effect without --kv-events: give both, or none")
        return {"cache_events": False, "event_tokens": False, "event_key": b""}
    local = [is_loopback(_host("--kv-events", publish))]
    if replay:
        local.append(is_loopback(_host("--kv-events-replay", replay)))
    for problem in _problems(settled, num_keys):
        raise ConfigError(problem)
    key = hmac.new(cluster_key, _PURPOSE, hashlib.sha256).digest() if cluster_key else secrets.token_bytes(32)
    return {"cache_events": True, "event_tokens": wants_tokens or (all(local) and num_keys <= 1), "event_key": key}


def _problems(settled: Settled, num_keys: int) -> Iterator[str]:
    """Yield what keeps events from being published as asked for."""
    if settled["disable_radix_cache"]:
        yield (
            "--kv-events: there is no prefix cache, so there would be no events: leave out --disable-radix-cache, or "
            "on a decode server give --disaggregation-decode-enable-radix-cache"
        )
    if settled["kv_events"] == settled["kv_events_replay"]:
        yield (f"--kv-events and --kv-events-replay are both {settled['kv_events']}: give the second a port of its own")
    if settled["kv_events_tokens"] and num_keys > 1:
        yield (
            f"--kv-events-tokens shows subscribers the prompts of all tenants, and there are {num_keys} API keys: "
            "leave it out, hashes do without tokens"
        )
    if importlib.util.find_spec("zmq") is None:
        yield "--kv-events needs ZeroMQ: pip install 'forebay[kv-events]'"


def _host(option: str, address: str) -> str:
    """Return the host of an address to listen at, "" for all. Raises ConfigError for another form."""
    url = urlsplit(address)
    try:
        port = url.port
    except ValueError:
        port = None
    if url.scheme != "tcp" or not url.hostname or not port or url.path:
        raise ConfigError(f"{option} {address!a} is no address to listen at: write one such as tcp://127.0.0.1:5557")
    return "" if url.hostname == "*" else url.hostname
