"""Ports, cores, room, keys and what Ray's workers inherit: the numbers and the order in which they are chosen."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import EngineError, Unavailable
from forebay.base.topology import Topology
from forebay.cluster import ports, surroundings
from forebay.cluster.cores import Cores, lock_folder
from forebay.cluster.messages import Listener, Needs
from forebay.cluster.placement import no_room, place, units_of
from forebay.cluster.ports import listen_on, listen_on_free_port, listeners
from forebay.cluster.surroundings import (
    Surroundings,
    environment_of_process,
    environment_of_server,
    niceness_of,
    note_of_niceness,
    restore,
    wanted,
)
from forebay.route.announcement import Role
from tests.cluster.test_placement import GIB, node, spec

# -- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_socket_listens_at_the_address_of_its_family_without_blocking(host: str, family: int) -> None:
    with listen_on(host, 0) as sock:
        assert sock.family == family
        assert sock.getsockname()[0] == host
        with pytest.raises(BlockingIOError):
            sock.accept()
        with pytest.raises(OSError) as taken:
            listen_on(host, sock.getsockname()[1])
        assert taken.value.errno == errno.EADDRINUSE


def test_port_is_tried_from_a_random_one_on_through_the_whole_range(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def taken(host: str, port: int) -> socket.socket:
        tried.append((host, port))
        raise OSError(errno.EADDRINUSE, "taken")

    monkeypatch.setattr(ports, "listen_on", taken)
    monkeypatch.setattr(random, "randrange", lambda count: count - 2)
    with pytest.raises(EngineError, match="no port of h is free from 7 to 10"):
        listen_on_free_port("h", range(7, 11))
    assert tried == [("h", port) for port in (9, 10, 7, 8)]
    assert (ports.FREE_PORTS.start, ports.FREE_PORTS.stop, ports.FREE_PORTS.step) == (20000, 30000, 1)


def test_backlog_is_a_thousand_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *at, **how: asked.append(how["backlog"]) or create(*at, **how))
    listen_on("127.0.0.1", 0).close()
    assert asked == [1024]


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 22 1 0 100 0 0 10 0
   2: 0100007F:1F91 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 33 1 0 100 0 0 10 0
   3: 0200000A:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 44 1 0 100 0 0 10 0
"""


def test_listeners_are_those_of_the_kernel_s_table_by_port_and_address(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)  # there is no tcp6
    for pid, name, targets in (("7", "raylet", ["socket:[22]", "/dev/null"]), ("8", "x", ["socket:[33]", "pipe:[11]"])):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text(f"{name}\n")
        for number, target in enumerate(targets):
            os.symlink(target, tmp_path / pid / "fd" / str(number))
    (tmp_path / "9").mkdir()  # a process that has ended, or another user's
    (tmp_path / "self" / "fd").mkdir(parents=True)
    os.symlink("socket:[11]", tmp_path / "self" / "fd" / "0")
    assert listeners(tmp_path) == (
        Listener(port=80, address="*", process="raylet"),
        Listener(port=80, address="10.0.0.2", process=""),
        Listener(port=8080, address="127.0.0.1", process=""),
    )


# -- cores ------------------------------------------------------------------------------------------------------------


def test_locks_of_cores_are_this_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = lock_folder()
    assert folder == lock_folder() == tmp_path / f"forebay-{os.getuid()}" / "cores"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Cores(folder).take(2, Topology(((4, 5),))) == (4, 5)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"4": 0o600, "5": 0o600}


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_cores_that_are_not_taken_leave_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    first, second = Cores(tmp_path), Cores(tmp_path)
    assert first.take(2, Topology(((0, 1),))) == (0, 1)
    assert open_files() == before + 2
    assert all(not os.get_inheritable(lock) for lock in first._locks.values())
    assert second.take(2, Topology(((0, 1, 2),))) == ()  # one of three is free
    assert open_files() == before + 2
    first.release()
    first.release()
    assert open_files() == before
    assert (first.cpus, second.take(1, Topology(((0, 1, 2),)))) == ((), (0,))
    second.release()


def test_cores_are_those_of_the_smallest_node_that_has_enough(tmp_path: Path) -> None:
    cores = Cores(tmp_path)
    assert cores.take(2, Topology(((0, 1, 2, 3), (4, 5, 6)))) == (4, 5)
    cores.release()


# -- room -------------------------------------------------------------------------------------------------------------


def test_node_that_has_exactly_what_is_needed_fits() -> None:
    tight = node(1, 2, gib=2, gpus=1)
    assert tight.fits(spec("s", gpus=1).needs)
    for amounts in ((1.999, 2, 1), (2, 1.999, 1), (2, 2, 0.999)):
        number_of_cpus, gib, gpus = amounts
        assert not node(1, number_of_cpus, gib=gib, gpus=gpus).fits(spec("s", gpus=1).needs)
    ray_s = node(1, 2 - 1e-7, gib=2, gpus=1 - 1e-7)  # Ray counts in ten-thousandths
    assert ray_s.fits(spec("s", gpus=1).needs)
    assert not node(1, 2 - 2e-6).fits(spec("s").needs)


def test_servers_take_what_they_need_from_a_node() -> None:
    full = node(1, 8, gib=8, gpus=2)
    place([[spec("a", gpus=1), spec("b", cpus=1)]], [full])
    assert (full.num_cpus, full.memory_bytes, full.num_gpus, full.num_servers) == (5, 4 * GIB, 1, 2)


def test_node_with_fewest_servers_goes_first_then_most_cpus_then_the_first_address() -> None:
    for nodes, name in (
        ([node(1, 8, servers=1), node(2, 2)], "n2"),
        ([node(1, 4), node(2, 5)], "n2"),
        ([node(2, 4), node(1, 4)], "n1"),
    ):
        assert [each.id for each in place([[spec("s")]], nodes)[0]] == [name]


def test_pair_without_room_is_named_with_the_needs_of_both() -> None:
    pair = units_of([spec("prefill-1", Role.PREFILL), spec("decode-1", Role.DECODE, gpus=1)], in_pairs=True)
    with pytest.raises(Unavailable) as refused:
        place(pair, [node(1, 3), node(2, -1, gib=-1)])
    assert refused.value.code == "no_room"
    assert refused.value.message == (
        "no node has enough resources for prefill-1 and decode-1: it needs 4 CPU, 4.0 GiB, 1 GPU; free: "
        "n1 (10.0.0.1) 3 CPU, 8.0 GiB; n2 (10.0.0.2) 0 CPU, 0 B"
    )
    assert no_room("x", Needs(num_cpus=1), []).endswith("free: there is no node")


def test_servers_beyond_pairs_are_placed_alone_of_either_role() -> None:
    specs = [spec("d1", Role.DECODE), spec("d2", Role.DECODE), spec("d3", Role.DECODE), spec("p1", Role.PREFILL)]
    assert [[each.name for each in unit] for unit in units_of(specs, in_pairs=True)] == [["p1", "d1"], ["d2"], ["d3"]]


# -- what Ray's workers inherit ---------------------------------------------------------------------------------------


def test_surroundings_are_the_raylet_s(tmp_path: Path) -> None:
    (tmp_path / str(os.getppid())).mkdir()
    (tmp_path / str(os.getppid()) / "oom_score_adj").write_text("17\n")
    found = wanted((1,), os.getppid(), tmp_path)
    niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
    assert found == Surroundings(niceness=niceness, oom_score_adj=17, cpus=(1,))


def test_restore_sets_this_process_and_its_cores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *at: calls.append(("niceness", *at)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *at: calls.append(("cores", *at)))
    monkeypatch.setattr(signal, "signal", lambda *at: calls.append(("handler", *at)))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *at: calls.append(("mask", *at)))
    (tmp_path / "self").mkdir()
    restore(Surroundings(niceness=3, oom_score_adj=5), tmp_path)
    first = [
        ("mask", signal.SIG_UNBLOCK, {signal.SIGINT}),
        ("handler", signal.SIGINT, signal.default_int_handler),
        ("niceness", os.PRIO_PROCESS, 0, 3),
    ]
    assert calls == first  # without cores of its own it keeps all
    restore(Surroundings(niceness=3, oom_score_adj=6, cpus=(1, 2)), tmp_path)
    assert calls == [*first, *first, ("cores", 0, (1, 2))]
    assert (tmp_path / "self" / "oom_score_adj").read_text() == "6"


def test_priority_for_the_out_of_memory_killer_may_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(Path, "write_text", refuse)
    surroundings.restore_priorities(Surroundings(niceness=0, oom_score_adj=0), tmp_path)


def test_environment_of_a_server_has_no_variable_of_ray_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "OMP_NUM_THREADS", "ARRAY_OF_MINE"):
        monkeypatch.setenv(name, "1")
    found = environment_of_server({"RAY_AUTH_MODE": "token", "PATH": "/raylet"})
    assert not {"RAY_AUTH_MODE", "OMP_NUM_THREADS"} & {*found}
    assert (found["ARRAY_OF_MINE"], found["PATH"]) == ("1", os.environ["PATH"])
    assert environment_of_server({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_environment_of_a_process_is_read_as_the_kernel_shows_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0B=x=y\0odd\0C=\xff\0")
    assert environment_of_process(7, tmp_path) == {"A": "1", "B": "x=y", "C": "\N{REPLACEMENT CHARACTER}"}
    assert environment_of_process(8, tmp_path) == {}


@pytest.mark.parametrize(("text", "niceness"), [("0", 0), ("-5", -5), ("7", 7), ("", 15), ("high", 15)])
def test_setting_of_ray_that_is_no_number_is_its_default(text: str, niceness: int) -> None:
    assert niceness_of({surroundings.NICENESS: text}) == niceness


def test_note_of_niceness_names_what_the_process_has() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert note_of_niceness(os.getpid(), own - 1) == (
        f"its processes have niceness {own}, and may not lower it: start Ray with RAY_worker_niceness=0"
    )
    assert note_of_niceness(os.getpid(), own + 1) == ""
    assert note_of_niceness(2**22 + 1, -20) == ""  # it has ended: no process has so high a number
