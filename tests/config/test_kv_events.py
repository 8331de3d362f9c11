"""The settings of events of the prefix cache: addresses, token ids, and the key of hashes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.flag import Settled
from forebay.config.kv_events import field_values

LOCAL, REMOTE = "tcp://127.0.0.1:5557", "tcp://*:5557"


def values(cluster_key: bytes = b"", num_keys: int = 0, **settings: Any) -> dict[str, Any]:
    given = {"kv_events": LOCAL, "kv_events_replay": "", "kv_events_tokens": False, "disable_radix_cache": False}
    return field_values(Settled(given | settings), cluster_key, num_keys=num_keys)


@pytest.mark.parametrize(
    ("settings", "num_keys", "expected"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"kv_events": REMOTE}, 1, False),
        ({"kv_events_replay": "tcp://10.0.0.1:5558"}, 1, False),
        ({"kv_events": REMOTE, "kv_events_tokens": True}, 1, True),
    ],
)
def test_token_ids_leave_the_machine_only_if_asked_for(settings: dict[str, Any], num_keys: int, expected: bool) -> None:
    assert values(num_keys=num_keys, **settings)["event_tokens"] is expected


@pytest.mark.parametrize(
    ("settings", "num_keys", "message"),
    [
        ({"kv_events_tokens": True}, 2, "there are 2 API keys"),
        ({"kv_events": "127.0.0.1:5557"}, 0, "is no address to listen at"),
        ({"kv_events": "tcp://127.0.0.1"}, 0, "is no address to listen at"),
        ({"kv_events_replay": LOCAL}, 0, "give the second a port of its own"),
        ({"kv_events": "", "kv_events_tokens": True}, 0, "has no effect without --kv-events"),
        ({"disable_radix_cache": True}, 0, "there is no prefix cache"),
    ],
)
def test_settings_of_events_that_cannot_work_are_refused(settings: dict[str, Any], num_keys: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        values(num_keys=num_keys, **settings)


def test_events_without_zeromq_are_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[kv-events\]'"):
        values()


def test_servers_of_a_cluster_have_one_key_of_hashes() -> None:
    first, second, alone, other = values(b"k" * 16), values(b"k" * 16), values(), values()
    assert first["event_key"] == second["event_key"] != b"k" * 16
    assert alone["event_key"] != other["event_key"]
