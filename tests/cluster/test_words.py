"""The words of servers and routers, what is refused before anything starts, and each field of a survey's answer."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from forebay.base.errors import ConfigError
from forebay.base.package import __version__
from forebay.cluster import node as node_module
from forebay.cluster.ingress import ChunkWriter, embedded, status_of
from forebay.cluster.messages import Facts, Listener, Needs
from forebay.cluster.options import UpOptions, counts_of, next_name, read_options, roles_of, up_parser
from forebay.cluster.placement import Node
from forebay.cluster.security import ports_text, refuse_open_cluster, refuse_unlike_nodes
from forebay.http.protocol import MAX_BUFFERED_BYTES
from forebay.route.announcement import Role
from tests.cluster.test_commands import surveyed
from tests.cluster.test_ingress import Sent, nothing
from tests.cluster.test_security import FACTS, NODES, PYTHON


def options(*words: str) -> UpOptions:
    return read_options(up_parser().parse(["org/name", *words]))


def test_options_without_words_are_those_of_one_server_and_one_router() -> None:
    found = options()
    assert found.counts == {Role.BOTH: 1}
    assert (found.address, found.standby, found.ready_timeout_s, found.num_gpus) == ("", False, 1800.0, 0.0)
    assert (found.cluster_key_file, found.key_files, found.drain_timeout_s) == ("", (), 30.0)
    assert found.router_options == ("--policy=cache_aware", "--balance-abs-threshold=8")
    router = found.router("router-1", host="h", node_address="a", standby="")
    assert (router.host, router.port, router.node_address, router.api_key_file) == ("h", 30000, "a", "")
    assert router.needs == Needs(num_cpus=0.0, memory_bytes=256 << 20)
    assert router.words[-3:] == ("--host=h", "--port=30000", "--allowed-hosts=a")


def test_options_are_those_of_their_words(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("api-key-file", "admin-api-key-file", "cluster-key-file")}
    for path in files.values():
        path.write_text("k" * 32)
        path.chmod(0o600)
    words = [f"--{name}={path}" for name, path in files.items()]
    found = options(
        "--replicas=64", "--address=h:1", "--standby", "--ready-timeout=1", "--drain-timeout=9", "--device=cuda", *words
    )
    assert found.counts == {Role.BOTH: 64}
    assert (found.address, found.standby, found.ready_timeout_s, found.num_gpus) == ("h:1", True, 1.0, 1.0)
    api, admin, cluster = map(str, files.values())
    assert found.key_files == (api, admin)
    assert found.cluster_key_file == cluster
    needs = Needs(num_cpus=3.0, memory_bytes=4, num_gpus=1.0)
    server = found.server("server-1", Role.BOTH, host="h", needs=needs, kv_cache_bytes=5, routers=["http://r:1"])
    assert (server.name, server.role, server.host, server.needs) == ("server-1", Role.BOTH, "h", needs)
    assert (server.api_key_file, server.admin_api_key_file, server.cluster_key_file) == (api, admin, cluster)
    assert (server.routers, server.drain_timeout_s) == (("http://r:1",), 9.0)
    assert server.words[-3:] == (f"--cluster-key-file={cluster}", "--num-threads=3", "--kv-cache-bytes=5")
    assert len([word for word in server.words if word.startswith("--cluster-key-file")]) == 1
    router = found.router("router-1", host="h", node_address="a", standby="http://s:2")
    assert (router.drain_timeout_s, router.api_key_file) == (9.0, api)
    assert f"--cluster-key-file={cluster}" in router.words
    assert not [word for word in router.words if word.startswith("--num-threads")]


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--replicas=65",), True),
        (("--pd=64p64d",), False),
        (("--pd=1P2D",), False),
        (("--pd=65p1d",), True),
        (("--pd=1p65d",), True),
        (("--pd=0p1d",), True),
        (("--ready-timeout=0.9",), True),
        (("--disaggregation-bootstrap-port=1",), True),
        (("--pd=1p1d", "--replicas=1"), True),
    ],
)
def test_numbers_of_servers_and_seconds_have_limits(words: tuple[str, ...], refused: bool) -> None:
    if refused:
        with pytest.raises(ConfigError):
            options(*words)
    else:
        options(*words)


def test_counts_are_prefill_then_decode() -> None:
    assert counts_of(" 3p1d ") == {Role.PREFILL: 3, Role.DECODE: 1}
    for text in ("", "3p1", "p1d", "1p1d1", "100p1d"):
        with pytest.raises(ConfigError, match=f"--pd '{text}' is not a set of servers"):
            counts_of(text)


def test_roles_are_started_in_pairs_first() -> None:
    p, d = Role.PREFILL, Role.DECODE
    assert [*roles_of({p: 1, d: 3})] == [p, d, d, d]
    assert [*roles_of({Role.BOTH: 2})] == [Role.BOTH] * 2
    assert next_name(Role.BOTH, []) == "server-1"
    assert next_name(Role.DECODE, ["decode-1", "decode-x", "xdecode-7", "decode-3x"]) == "decode-2"


def test_pair_has_the_cluster_s_key_in_its_own_words_and_no_size_that_is_placed() -> None:
    found = options("--pd=1p1d", "--num-threads=7", "--kv-cache-bytes=32MiB", "--max-n=9")
    for role, mode in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode")):
        words = found.words(role)
        assert {f"--disaggregation-mode={mode}", "--max-n=9", "--cluster-key-file="} <= {*words}
        assert not [word for word in words if word.startswith(("--num-threads", "--kv-cache-bytes"))]
        assert found.words_to_plan(role)[-2:] == ("--num-threads=7", f"--kv-cache-bytes={32 << 20}")
    assert not [word for word in options().words(Role.BOTH) if word.startswith("--cluster-key-file")]
    assert options().words_to_plan(Role.BOTH) == options().words(Role.BOTH)


# -- security ---------------------------------------------------------------------------------------------------------


def test_all_that_is_open_is_said_at_once_and_each_host_once() -> None:
    twice = [*NODES, Node(id="n3", address="10.0.0.3", hostname="host2", num_cpus=1, memory_bytes=1)]
    facts = {"n1": FACTS} | {name: msgspec.structs.replace(FACTS, auth_mode="") for name in ("n2", "n3")}
    with pytest.raises(ConfigError) as refused:
        refuse_open_cluster(twice, facts, "")
    first, second = refused.value.message.split("; and ")
    assert first.startswith(
        "the cluster has nodes on other machines: Ray runs without RAY_AUTH_MODE=token on host2, so"
    )
    assert second.startswith("servers and routers must prove who they are")


def test_each_node_that_differs_has_a_line_and_keys_are_compared_last() -> None:
    facts = {
        "n1": msgspec.structs.replace(FACTS, forebay="0", python="0", key_digest="b"),
        "n2": msgspec.structs.replace(FACTS, python="0", problem="none"),
    }
    with pytest.raises(ConfigError) as refused:
        refuse_unlike_nodes(NODES, facts, PYTHON)
    assert refused.value.message.splitlines() == [
        f"host1 (10.0.0.1) has forebay 0, and this machine {__version__}",
        f"host2 (10.0.0.2) has Python 0, and this machine {PYTHON}",
    ]


def test_open_ports_are_by_process_each_once() -> None:
    where = (
        ("b", 1, "10.0.0.1"),
        ("a", 2, "*"),
        ("b", 1, "*"),
        ("c", 3, "127.1.2.3"),
        ("c", 4, "::1"),
        ("d", 5, "::2"),
    )
    found = [Listener(port=port, address=address, process=name) for name, port, address in where]
    assert ports_text("n", found) == "open ports of n: a 2; b 1; d 5"


# -- survey -----------------------------------------------------------------------------------------------------------


def test_survey_tells_what_the_raylet_of_the_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = {
        "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "3", "RAY_gcs_rpc_server_reconnect_timeout_s": "77"
    }  # fmt: skip
    asked: list[int] = []
    ports = (Listener(port=1, address="*", process="raylet"),)
    monkeypatch.setattr(node_module, "environment_of_process", lambda pid: asked.append(pid) or raylet)
    monkeypatch.setattr(node_module, "listeners", lambda: ports)
    assert surveyed(share=0) == Facts(
        hostname=socket.gethostname(), forebay=__version__, python=platform.python_version(), auth_mode="token",
        niceness=3, gcs_timeout_s=77, listeners=ports,
    )  # fmt: skip
    assert asked == [os.getppid()]


def test_survey_plans_with_whole_cores_and_says_one_line(
    monkeypatch: pytest.MonkeyPatch, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    amounts: list[Any] = []

    class Plan:
        needed_bytes, kv_cache_bytes = 7, 5

    def make_plan(parsed: Any, memory: Any, **_: Any) -> Any:
        amounts.append((memory.value, memory.why))
        print("a note", file=sys.stderr)
        return Plan

    monkeypatch.setattr("forebay.cli.plan.make_plan", make_plan)
    model = f"--model-path={embedded_model}"
    for share, num_cpus, threads in ((4, 6.9, 1), (3, 6.9, 2), (9, 6.0, 1), (1, 6.9, 6)):
        found = surveyed(model, share=share, num_cpus=num_cpus, memory_bytes=1000)
        assert (found.num_threads, found.memory_bytes, found.kv_cache_bytes) == (threads, 7, 5)
        assert amounts.pop() == (1000 // share, f"for one of {share} servers of this node")
    assert "models pull" in surveyed("--model-path=org/that-is-not-here").problem

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("first\nsecond")

    monkeypatch.setattr("forebay.cli.plan.make_plan", refuse)
    assert surveyed(model).problem == "first"
    assert capsys.readouterr() == ("", "")  # the command prints the notes


def test_survey_reads_each_key_file_up_to_64_kib(tmp_path: Path) -> None:
    key, long = tmp_path / "key", tmp_path / "long"
    key.write_text("k" * 32 + "\n" * ((64 << 10) - 32))
    long.write_text("k" * 32 + "\n" * ((64 << 10) - 31))
    for path in (key, long):
        path.chmod(0o600)
    assert surveyed(share=0, key_files=(str(key),)).problem == ""
    assert surveyed(share=0, key_files=(str(key), str(long))).problem != ""
    digest = surveyed(share=0, cluster_key_file=str(key)).key_digest
    assert len(digest) == 16
    assert surveyed(share=0).key_digest == ""


# -- ingress ----------------------------------------------------------------------------------------------------------


async def test_chunks_up_to_a_mebibyte_wait_for_a_reader() -> None:
    sent = Sent()
    sent.open.clear()
    writer = ChunkWriter(sent)
    assert writer.write_chunk(bytes(MAX_BUFFERED_BYTES))
    assert not writer.write_chunk(b"x")
    assert not ChunkWriter(sent).write_chunk(bytes(MAX_BUFFERED_BYTES + 1))
    sent.open.set()
    while not sent.messages:
        await asyncio.sleep(0)
    assert writer.write_chunk(b"y")  # by another task, since the first has ended
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent.messages == [
        {"type": "http.response.body", "body": body, "more_body": True} for body in (bytes(MAX_BUFFERED_BYTES), b"y")
    ]


async def test_application_keeps_the_extensions_of_its_server() -> None:
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append((scope, await receive()))
        await send({"type": "http.response.start", "status": 201})

    sent = Sent()

    async def receive() -> Message:
        return {"type": "http.request"}

    await embedded(app, nothing)({"type": "http", "extensions": {"a": {}}, "path": "/x"}, receive, sent)
    [(scope, request)] = scopes
    assert (scope["type"], scope["path"], request) == ("http", "/x", {"type": "http.request"})
    assert next(iter(scope["extensions"])) == "a"
    assert len(scope["extensions"]) == 2
    assert sent.messages == [{"type": "http.response.start", "status": 201}]
    assert await status_of(app, "/b") == 201
    scope, request = scopes[-1]
    assert request == {"type": "http.request", "body": b"", "more_body": False}
    assert scope == {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": "/b", "raw_path": b"/b", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost")], "client": None, "server": None,
    }  # fmt: skip

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return

    assert await status_of(silent, "/b") == 500
