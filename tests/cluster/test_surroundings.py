"""What Ray does to its workers' children, each undone by the child itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.base.topology import Topology
from forebay.cluster import surroundings
from forebay.cluster.cores import Cores
from forebay.cluster.surroundings import (
    Surroundings,
    environment_of_server,
    gcs_timeout_s,
    niceness_of,
    note_of_niceness,
    read_surroundings,
    restore,
    wanted,
)

REPORT = """
import json, os, signal, sys
from forebay.cluster.surroundings import read_surroundings, restore
restore(read_surroundings(sys.argv[1]))
print(json.dumps({
    "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    "oom_score_adj": int(open("/proc/self/oom_score_adj").read()),
    "cpus": sorted(os.sched_getaffinity(0)),
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "handled": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
"""


def as_ray_starts(target: Surroundings) -> dict[str, Any]:
    """Return what a process has that began as Ray's workers do: niceness, oom_score_adj 1000, SIGINT blocked."""

    def spoil() -> None:
        os.nice(5)
        Path("/proc/self/oom_score_adj").write_text("1000")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    done = subprocess.run(
        [sys.executable, "-c", REPORT, target.as_text()], preexec_fn=spoil, capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_restore_undoes_all_that_ray_does() -> None:
    ours = wanted((min(os.sched_getaffinity(0)),), os.getpid())
    found = as_ray_starts(ours)
    assert found["cpus"] == [*ours.cpus]
    assert found["blocked"] == []
    assert found["handled"]
    if os.getuid() == 0:  # others may not lower either
        assert found["niceness"] == ours.niceness
        assert found["oom_score_adj"] == ours.oom_score_adj


def test_restore_without_privileges_leaves_the_priorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    (tmp_path / "self").mkdir()
    before = signal.getsignal(signal.SIGINT)
    restore(Surroundings(niceness=-5, oom_score_adj=3), tmp_path)
    signal.signal(signal.SIGINT, before)
    assert (tmp_path / "self" / "oom_score_adj").read_text() == "3"


def test_niceness_above_the_raylets_is_noted() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert note_of_niceness(os.getpid(), own) == ""
    assert "start Ray with RAY_worker_niceness=0" in note_of_niceness(os.getpid(), own - 1)


def test_environment_of_a_server_has_no_token_and_the_raylets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RAY_AUTH_TOKEN": "secret", "FOREBAY_API_KEY": "secret", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    found = environment_of_server({})
    assert "secret" not in found.values()
    assert "OMP_NUM_THREADS" not in found
    assert environment_of_server({"OMP_NUM_THREADS": "6"})["OMP_NUM_THREADS"] == "6"


def test_settings_of_ray_have_its_defaults_where_none_are_set() -> None:
    assert (niceness_of({}), gcs_timeout_s({})) == (15, 60)
    ours = {surroundings.NICENESS: "0", surroundings.GCS_TIMEOUT: "600"}
    assert (niceness_of(ours), gcs_timeout_s(ours)) == (0, 600)


def test_surroundings_are_read_as_they_were_written() -> None:
    found = Surroundings(niceness=-3, oom_score_adj=0, cpus=(1, 5))
    assert read_surroundings(found.as_text()) == found


def test_cores_are_one_server_s_until_it_ends(tmp_path: Path) -> None:
    topology = Topology(((0, 1), (2, 3, 4, 5)))
    first, second, third = (Cores(tmp_path) for _ in range(3))
    assert first.take(3, topology) == (2, 3, 4)
    assert second.take(2, topology) == (0, 1)
    assert third.take(2, topology) == ()
    assert third.cpus == ()
    first.release()
    assert third.take(4, topology) == (2, 3, 4, 5)


def test_cores_of_two_nodes_are_taken_where_one_has_too_few(tmp_path: Path) -> None:
    assert Cores(tmp_path).take(3, Topology(((0, 1), (2, 3)))) == (0, 1, 2)
