"""What each server of `--pd local` is started with."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from forebay.cli import local_fleet
from forebay.cli.local_fleet import fleet_of
from forebay.cli.serve import parse
from forebay.cli.serving import serve_from
from forebay.config.flag import Settled
from forebay.config.keys import cluster_key
from forebay.config.resolve import resolve, written_values

pytestmark = pytest.mark.usefixtures("decides_for_avx2")

KEY = "sk-canary-0123456789"


def test_servers_have_what_was_written_for_them_and_their_share(embedded_model: Path) -> None:
    flags = {
        "pd": "local:2p1d",
        "port": 1,
        "api_key": KEY,
        "max_n": 9,
        "num_threads": 7,
        "kv_cache_bytes": 96 << 20,
        "num_reserved_decode_tokens": 64,
        "speculative_algorithm": "NGRAM",
        "disable_radix_cache": True,
        "chaos": "drop=1%,kill-prefill=30s",
    }
    fleet = fleet_of(written_values(flags, {}), resolve(flags))
    for server in fleet.servers:
        server.sock.close()
    for fd in fleet.files:
        os.close(fd)
    first, second, decode = ({*server.words} for server in fleet.servers)
    shared = {"--max-n=9", "--num-threads=2", f"--kv-cache-bytes={32 << 20}", "--chaos=drop=1%"}
    assert shared <= first & decode
    assert first == second
    assert {"--disaggregation-mode=prefill", "--disaggregation-bootstrap-port=0", "--disable-radix-cache=true"} <= first
    assert {"--disaggregation-mode=decode", "--num-reserved-decode-tokens=64"} <= decode - first
    assert "--speculative-algorithm=NGRAM" in decode - first
    assert not [word for word in first | decode if KEY in word or word.startswith(("--port", "--pd", "--api-key="))]
    assert "--disable-radix-cache=true" not in decode  # whose own way is another flag


def test_servers_and_router_share_a_cluster_key_that_is_in_no_argument(embedded_model: Path) -> None:
    """C33: a lone role needs a key, and whoever lists processes must not see it."""
    flags = {"pd": "local"}
    fleet = fleet_of(written_values(flags, {}), resolve(flags))
    for server in fleet.servers:
        server.sock.close()
        [word] = [word for word in server.words if word.startswith("--cluster-key-file=")]
        assert cluster_key(Settled({"cluster_key_file": word.partition("=")[2]})) == fleet.cluster_key
    secret = fleet.cluster_key.decode()
    assert len(secret) == 2 * local_fleet.KEY_BYTES
    assert secret not in "".join(map(str, (repr(fleet), *(server.words for server in fleet.servers))))
    again = fleet_of(written_values(flags, {}), resolve(flags))
    assert again.cluster_key != fleet.cluster_key
    for server in again.servers:
        server.sock.close()
    for fd in (*fleet.files, *again.files):
        os.close(fd)


def test_garbage_is_collected_in_a_router(monkeypatch: pytest.MonkeyPatch, embedded_model: Path) -> None:
    """Which lives as long as a server does, whose start has the collector off."""
    monkeypatch.setattr(local_fleet, "serve_fleet", lambda parsed, config: gc.isenabled())
    assert serve_from(parse(["--pd=local"]), None)
