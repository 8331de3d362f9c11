"""The survey of a node, the shares of servers, and what commands print, without Ray."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from forebay.base.errors import ConfigError, Unavailable
from forebay.base.package import __version__
from forebay.cli.main import main
from forebay.cluster import local, up
from forebay.cluster.commands import _node_lines, _start_lines, _status_lines
from forebay.cluster.messages import Facts, Phase, Start, Status, Survey
from forebay.cluster.node import survey
from forebay.cluster.options import UpOptions, read_options, up_parser
from forebay.cluster.placement import Node
from forebay.route.announcement import Role
from tests.deadlines import HANGS_S, wait_until

GIB = 1 << 30


def surveyed(*words: str, share: int = 1, **fields: object) -> Facts:
    request = Survey(words=words, share=share, num_cpus=6, memory_bytes=8 * GIB)
    return msgspec.msgpack.decode(survey(msgspec.structs.replace(request, **fields).encode()), type=Facts)


def test_survey_plans_one_server_with_its_share_of_the_node(embedded_model: Path) -> None:
    found = surveyed(f"--model-path={embedded_model}", share=3)
    assert (found.problem, found.forebay, found.num_threads) == ("", __version__, 2)
    assert 0 < found.kv_cache_bytes < found.memory_bytes < 8 * GIB / 3
    asked = surveyed(f"--model-path={embedded_model}", "--num-threads=5", "--kv-cache-bytes=32MiB")
    assert (asked.num_threads, asked.kv_cache_bytes) == (5, 32 << 20)


def test_survey_says_in_a_line_why_no_server_can_run(tmp_path: Path, embedded_model: Path) -> None:
    assert "there is no model at '/nowhere'" in surveyed("--model-path=/nowhere").problem
    assert "does not fit" in surveyed(f"--model-path={embedded_model}", memory_bytes=1 << 20).problem or "memory" in (
        surveyed(f"--model-path={embedded_model}", memory_bytes=1 << 20).problem
    )
    missing = str(tmp_path / "keys")
    assert missing in surveyed(f"--model-path={embedded_model}", key_files=(missing,)).problem
    assert surveyed("--model-path=/nowhere", share=0).problem == ""  # a node without CPUs has no server


def test_survey_has_a_digest_of_the_cluster_key_and_not_the_key(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path, text in ((first, "a" * 32), (second, "b" * 32)):
        path.write_text(text)
    digests = {surveyed(share=0, cluster_key_file=str(path)).key_digest for path in (first, second, first)}
    assert len(digests) == 2
    assert not {"a" * 16, ""} & digests


def options(*words: str) -> UpOptions:
    return read_options(up_parser().parse(["org/name", *words]))


def nodes(*addresses: str, cpus: float = 4) -> list[Node]:
    return [
        Node(id=address, address=address, hostname=address, num_cpus=cpus, memory_bytes=8 * GIB, total_cpus=cpus)
        for address in addresses
    ]


@pytest.mark.parametrize(
    ("words", "num_nodes", "share"),
    [
        (["--replicas=4"], 2, 2),
        (["--replicas=5"], 2, 3),
        (["--pd=1p1d"], 2, 1),
        (["--pd=1p1d", "--disaggregation-transfer-backend=shm"], 2, 2),
        (["--pd=2p2d", "--disaggregation-transfer-backend=shm"], 2, 2),
    ],
)
def test_share_is_the_number_of_servers_of_the_fullest_node(words: list[str], num_nodes: int, share: int) -> None:
    assert up.share_of(options(*words), num_nodes) == share


def test_servers_are_alike_and_have_what_the_smallest_node_gives() -> None:
    facts = {
        address: Facts(
            hostname=address, forebay="", python="", auth_mode="", niceness=0, gcs_timeout_s=60, num_threads=threads,
            memory_bytes=memory, kv_cache_bytes=memory // 2,
        )
        for address, threads, memory in (("a", 4, 2 * GIB), ("b", 2, 3 * GIB))
    }  # fmt: skip
    servers = up.servers_of(options("--replicas=2"), nodes("a", "b"), facts, ["http://r:1"], one_machine=False)
    assert [spec.name for spec in servers] == ["server-1", "server-2"]
    assert {(spec.needs.num_cpus, spec.needs.memory_bytes, spec.host) for spec in servers} == {(2, 2 * GIB, "")}
    assert f"--kv-cache-bytes={GIB}" in servers[0].words


def test_standby_router_is_on_another_node_and_known_to_the_active_one() -> None:
    standby, active = up.routers_of(options("--standby"), nodes("a", "b"), "b", one_machine=False)
    assert (active.node_address, standby.node_address) == ("b", "a")
    assert "--standby=http://a:30000" in active.words
    standby, active = up.routers_of(options("--standby"), nodes("a"), "a", one_machine=True)
    assert (up.url_of(active), up.url_of(standby)) == ("http://127.0.0.1:30000", "http://127.0.0.1:30001")


def test_report_of_progress_is_written_at_once_to_a_pipe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    up.report("waiting")
    assert pipe.getvalue() == b"waiting\n"


def test_status_lines_name_what_is_wrong() -> None:
    found = Status(
        name="server-1", role=Role.BOTH, phase=Phase.STARTING, url="http://h:1", pid=7, instance="", num_starts=2,
        weight_version="1", why="the last process ended with code 1: killed", node_address="a", hostname="n", cpus=(2,),
        notes=("its processes have niceness 15",),
    )  # fmt: skip
    first, *others = _status_lines("server-1", found)
    assert first.split() == (
        ["server-1", "starting", "http://h:1", "n,", "pid", "7,", "cores", "2,", "2", "starts,", "weights", "1"]
    )
    assert others == ["  the last process ended with code 1: killed", "  its processes have niceness 15"]
    assert _status_lines("server-2", "no answer")[0].split() == ["server-2", "lost", "no", "answer"]


def test_start_lines_say_what_to_do_without_servers_or_routers_or_after_an_up_that_was_cut() -> None:
    assert "start some with forebay cluster up" in _start_lines([], None)[0]
    assert "no router runs: end the servers with forebay cluster down" in _start_lines(["server-1"], None)[0]
    assert _start_lines(["router-1", "server-1"], None) == []
    start = Start(hostname="other", pid=7, names=("server-1", "router-1"))
    assert "router-1 is missing" in _start_lines(["server-1"], start)[0]


def test_status_behind_a_start_of_ray_that_was_cut_says_what_is_left(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes of a start have Ray's folder among their arguments."""
    folder = f"/tmp/forebay-{os.getuid()}/ray-of-a-test"
    (local.folder() / "head.json").write_bytes(msgspec.json.encode(local.Head(address="127.0.0.1:1", folder=folder)))
    with subprocess.Popen([sys.executable, "-c", "input()", folder], stdin=subprocess.PIPE) as left:
        wait_until(lambda: folder in Path(f"/proc/{left.pid}/cmdline").read_text())
        assert main(["cluster", "status"]) == 2
        assert "1 of its processes run, and no server" in capsys.readouterr().err
        local.stop(local.Head(address="", folder=folder))
        assert left.wait(HANGS_S) < 0
    assert main(["cluster", "status"]) == 2
    assert "no cluster of Forebay's runs on this machine" in capsys.readouterr().err


def test_node_lines_show_how_long_servers_live_without_the_gcs() -> None:
    facts = Facts(hostname="n", forebay="", python="", auth_mode="", niceness=15, gcs_timeout_s=60)
    text = "\n".join(_node_lines(nodes("a")[0], facts))
    assert "without the GCS for at most 60 s" in text
    assert "RAY_gcs_rpc_server_reconnect_timeout_s=600" in text
    assert "RAY_worker_niceness=0" in text
    ours = msgspec.structs.replace(facts, niceness=0, gcs_timeout_s=600)
    assert "RAY_" not in "\n".join(_node_lines(nodes("a")[0], ours))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "use up, status, scale, update, logs, down"),
        (["update"], "give either MODEL or --weights PATH"),
        (["update", "x", "--weights=y"], "give either MODEL or --weights PATH"),
        (["status"], "no cluster of Forebay's runs on this machine"),
    ],
)
def test_command_that_cannot_work_says_why(
    words: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_ray_a_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["cluster", "status", "--address=127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == (
        "forebay: error: forebay cluster needs Ray, which is not installed: pip install 'forebay[ray]' on every node\n"
    )


def test_only_the_cluster_package_imports_ray_and_only_in_functions() -> None:
    package = Path(local.__file__).parents[1]
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "import ray" not in text and "from ray" not in text:
            continue
        tree = ast.parse(text)
        at_top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "ray" for name in names):
                found.add((path.parent.name, id(node) in at_top))
    assert found == {("cluster", False)}


def test_key_files_of_a_local_cluster_are_private_and_kept(home: Path) -> None:
    path = local.key_file("cluster.key")
    text = path.read_text()
    assert len(text) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert local.key_file("cluster.key").read_text() == text
    assert local.environment()["RAY_AUTH_TOKEN_PATH"] == str(home / ".cache/forebay/cluster/token")


def test_head_that_has_ended_does_not_run(home: Path) -> None:
    assert local.running() is None
    head = local.Head(address="127.0.0.1:1", folder=f"/tmp/forebay-{os.getuid()}/ray-that-is-not")
    (local.folder() / "head.json").write_bytes(msgspec.json.encode(head))
    assert local.running() is None


class SilentRay:
    """A cluster whose GCS has died, and what was ended of it without Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.error, self.stopped = error, list[local.Head]()
        monkeypatch.setattr(up, "connected", self.connected)
        monkeypatch.setattr(local, "stop", self.stopped.append)

    def connected(self, address: str) -> NoReturn:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("Ray's GCS does not answer at 127.0.0.1:1 (refused): servers and routers run on"),
        ConfigError("no cluster of Forebay's runs on this machine"),
        RuntimeError("RpcError: unavailable\nmore"),
        TimeoutError(),
    ],
)
@pytest.mark.parametrize("words", [[], ["--now"]])
def test_cluster_down_ends_own_ray_that_does_not_answer(
    home: Path, error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = local.Head(address="127.0.0.1:1", folder=f"/tmp/forebay-{os.getuid()}/ray-that-is-not")
    (local.folder() / "head.json").write_bytes(msgspec.json.encode(head))
    ray = SilentRay(monkeypatch, error)
    assert main(["cluster", "down", *words]) == 0
    assert ray.stopped == [head]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Ray does not answer (")
    assert second == "Ray has ended"


def test_cluster_down_of_another_ray_or_of_none_tells_why_it_cannot(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = SilentRay(monkeypatch, Unavailable("Ray's GCS does not answer"))
    assert main(["cluster", "down"]) == 1
    head = local.Head(address="127.0.0.1:1", folder=f"/tmp/forebay-{os.getuid()}/ray-that-is-not")
    (local.folder() / "head.json").write_bytes(msgspec.json.encode(head))
    assert main(["cluster", "down", "--address=10.0.0.1:6379"]) == 1
    assert capsys.readouterr().err.count("Ray's GCS does not answer") == 2
    assert ray.stopped == []
