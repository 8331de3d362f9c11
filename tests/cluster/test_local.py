"""Forebay's own Ray on this machine: how it is started, found and ended, with processes that are not Ray's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError, EngineError
from forebay.cluster import local
from forebay.cluster.local import Head
from tests.cluster.fake_ray import FakeRay, fake_ray
from tests.deadlines import HANGS_S

__all__ = ["fake_ray"]  # a fixture


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this user for Ray's folders."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="fb") as found:
        monkeypatch.setattr(tempfile, "tempdir", found)
        monkeypatch.setattr(local, "MAX_FOLDER_CHARS", 60)
        yield Path(found) / f"forebay-{os.getuid()}"


class Started:
    """`subprocess.Popen` of a shell's line in place of Ray."""

    def __init__(self, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command: list[str] = []
        self.settings: dict[str, Any] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        popen = subprocess.Popen

        def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
            self.command, self.settings = command, settings
            self.processes.append(popen(["sh", "-c", line], **settings))
            return self.processes[-1]

        monkeypatch.setattr(local.subprocess, "Popen", start)


def test_head_that_starts_is_kept_with_its_address_and_folder(
    folder: Path, home: Path, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started("echo it runs; env > $HOME/env; echo and more >&2", monkeypatch)
    head = local.start()
    host, _, port = head.address.partition(":")
    assert (host, 20000 <= int(port) < 30000) == ("10.0.0.7", True)
    assert Path(head.folder).parent == folder
    assert Path(head.folder).name.startswith("ray-")
    assert folder.stat().st_mode & 0o777 == Path(head.folder).stat().st_mode & 0o777 == 0o700
    assert local.started() == head
    assert started.command == [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
        *("--disable-usage-stats", f"--temp-dir={head.folder}", f"--object-store-memory={80 << 20}"),
        f"--num-cpus={local.usable_cores().value}",
    ]
    assert (started.settings["stdin"], started.settings["start_new_session"]) == (subprocess.DEVNULL, True)
    assert (local.folder() / "ray.log").read_text() == "it runs\nand more\n"
    variables = dict(line.partition("=")[::2] for line in (home / "env").read_text().splitlines())
    assert variables["PATH"] == os.environ["PATH"]
    assert {name: variables[name] for name in (*local.SETTINGS, local.TOKEN_PATH)} == local.environment()


def test_head_of_ray_waits_for_its_servers_and_finds_a_silent_node_within_seconds() -> None:
    assert local.SETTINGS == {
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_health_check_initial_delay_ms": "3000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "4",
    }


def test_head_that_fails_is_told_with_its_last_lines_and_leaves_nothing(
    folder: Path, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    Started("for i in 1 2 3 4; do echo line $i; done; exit 3", monkeypatch)
    with pytest.raises(EngineError) as failed:
        local.start()
    log = local.folder() / "ray.log"
    assert failed.value.message == f"Ray has not started: line 2 line 3 line 4 (all of it is in {log})"
    assert local.started() is None
    assert [*folder.iterdir()] == []


def test_head_that_never_answers_is_ended(folder: Path, fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.05)
    started = Started(f"exec sleep {HANGS_S}", monkeypatch)
    with pytest.raises(EngineError, match="Ray has not started"):
        local.start()
    assert started.processes[0].returncode == -9


@contextlib.contextmanager
def process_of(head: Head, line: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a head's folder among its arguments, which has begun. It has no children: one that has been forked
    has its arguments, too, until it runs another program."""
    command = ["sh", "-c", f"{line}; echo begun; while :; do read -r _; done", *words, head.folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        try:
            yield process
        finally:
            process.kill()


def reaped(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reap a child as init does with Ray's processes: one that has ended has no arguments any more, but is there."""
    until = local._until

    def waits(seconds: float) -> Iterator[None]:
        for _ in until(seconds):
            process.poll()
            yield

    monkeypatch.setattr(local, "_until", waits)


def head_in(folder: Path) -> Head:
    head = Head(address="10.0.0.7:1", folder=str(folder / "ray-x"))
    Path(head.folder).mkdir(parents=True)
    (local.folder() / "head.json").write_bytes(msgspec.json.encode(head))
    return head


def test_head_runs_as_long_as_its_raylet(folder: Path) -> None:
    head = head_in(folder)
    with process_of(head, ":", "gcs_server"):
        assert local.running() is None
        with process_of(head, ":", "raylet"):
            assert local.running() == head
        with process_of(Head(address="", folder="/tmp/another"), ":", "raylet"):
            assert local.running() is None
    (local.folder() / "head.json").write_text("{")
    assert local.started() is None


def test_stop_ends_what_is_asked_and_what_does_not_listen_and_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_in(folder)
    monkeypatch.setattr(local, "END_GRACE_S", 0.3)
    other = Head(address="", folder=str(folder / "ray-y"))
    with process_of(other, ":") as another, process_of(head, "trap '' TERM") as deaf, process_of(head, ":") as one:
        local.stop(head)
        assert deaf.wait(HANGS_S) == -9
        assert one.wait(HANGS_S) == -15
        assert another.poll() is None
    assert not Path(head.folder).exists()
    assert local.started() is None
    local.stop(head)  # of which nothing is left


def test_stop_leaves_time_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_in(folder)
    with process_of(head, "trap 'sleep 0.3; exit 5' TERM") as process:
        reaped(process, monkeypatch)
        local.stop(head)
        assert process.returncode == 5


def test_command_means_the_given_cluster_or_the_one_that_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(local.os, "environ", variables)
    assert local.connect_address("10.0.0.1:6379", may_start=True) == "10.0.0.1:6379"
    assert local.TOKEN_PATH not in local.os.environ
    with pytest.raises(ConfigError, match="no cluster of Forebay's runs on this machine"):
        local.connect_address("", may_start=False)
    assert local.os.environ[local.TOKEN_PATH] == str(local.folder() / "token")
    monkeypatch.setattr(local, "start", lambda: Head(address="new", folder=""))
    assert local.connect_address("", may_start=True) == "new"
    assert capsys.readouterr().out == "starting Ray on this machine\n"
    head = head_in(folder)
    with process_of(head, ":", "raylet"):
        assert local.connect_address("", may_start=False) == head.address
    assert capsys.readouterr().out == ""
    with process_of(head, ":", "gcs_server"), pytest.raises(ConfigError, match=r"whole .*: 1 of its processes run"):
        local.connect_address("", may_start=False)
    assert local.connect_address("", may_start=True) == "new"
    assert capsys.readouterr().out == (
        "ending what is left of an earlier Ray: 0 processes\nstarting Ray on this machine\n"
    )
    assert local.started() is None


def test_folder_of_ray_is_short_enough_for_its_sockets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local._private_folder() == folder
    limit = len(str(folder))
    monkeypatch.setattr(local, "MAX_FOLDER_CHARS", limit)
    assert local._private_folder() == folder
    made: list[Path] = []
    monkeypatch.setattr(local, "private_folder", lambda path: made.append(path) or path)
    monkeypatch.setattr(local, "MAX_FOLDER_CHARS", limit - 1)
    assert local._private_folder() == Path(f"/tmp/forebay-{os.getuid()}")
    assert made == [Path(f"/tmp/forebay-{os.getuid()}")]


def test_paths_of_ray_s_sockets_fit_into_those_of_unix() -> None:
    assert local.MAX_FOLDER_CHARS == 107 - 84 - 1  # and a byte of zero at the end


def test_key_files_of_two_names_differ(home: Path) -> None:
    assert local.key_file("token").read_text() != local.key_file("cluster.key").read_text()


def test_waiting_looks_every_tenth_of_a_second_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(local.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    looks = [round(now[0], 6) for _ in local._until(0.25)]
    assert looks == [5.0, 5.1, 5.2]


def test_process_that_ends_while_it_is_looked_for_is_none_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_in(folder)
    proc = folder / "proc"
    for name, text in (("1", f"raylet {head.folder}"), ("2", None), ("self", head.folder), ("3", "other")):
        (proc / name).mkdir(parents=True)
        if text is not None:
            (proc / name / "cmdline").write_text(text)
    monkeypatch.setattr(local, "PROC", proc)
    assert [*local._processes(head)] == [(1, f"raylet {head.folder}")]
    monkeypatch.setattr(local.os, "getuid", lambda: 4711)
    assert [*local._processes(head)] == []
