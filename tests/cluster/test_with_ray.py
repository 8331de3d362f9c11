"""`forebay cluster` on Ray: one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.base.paths import cache_folder
from tests.cluster.load import PROMPTS, ask
from tests.cluster.machines import SMALL, Machines, codes, is_alive, local, needs_ray, of_home, tokens
from tests.deadlines import wait_until
from tests.engine.conftest import make_chat_model
from tests.integration.test_processes import listeners
from tests.integration.tree import serving

pytestmark = [needs_ray, pytest.mark.slow]  # each starts Ray, and several servers


def make_home(folder: Path) -> Path:
    (folder / ".cache" / "forebay").mkdir(parents=True)
    (folder / ".cache" / "forebay" / "ops").symlink_to(cache_folder("ops"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"), context_length=2048).path


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """The tokens of one server."""
    with serving(tmp_path_factory.mktemp("one") / "tree", model, *SMALL) as tree:
        return tokens([ask("127.0.0.1", tree.port, "", prompt) for prompt in PROMPTS])


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with local(make_home(tmp_path / "home")) as found:
        yield found


def environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace")


def blocked(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk")]
    return int(line.split()[1], 16)


def test_cluster_of_one_replica_goes_up_and_down_and_leaves_nothing(machines: Machines, model: Path) -> None:
    """Ray's treatment of child processes is undone, no key is seen, and no process is left."""
    port = free_port()
    text = machines.run("up", model, *SMALL, f"--port={port}")
    assert f"ready at http://127.0.0.1:{port}" in text
    assert "open ports of" in text
    answer = ask("127.0.0.1", port, "", PROMPTS[0])
    assert answer["status"] == 200
    status = machines.status()
    server = status["server-1"]
    assert answer["server"] == server["url"]
    for each in status.values():  # J-1: one listener of each process, on loopback
        [(address, table)] = listeners([each["pid"]])
        assert (address.partition(":")[0], table) == ("0100007F", "tcp")
    pid, own = server["pid"], os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == own  # RAY_worker_niceness=0
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    assert [*os.sched_getaffinity(pid)] == server["cpus"]
    assert not blocked(pid) & 1 << signal.SIGINT - 1
    assert "OMP_NUM_THREADS=1" not in environ(pid).split("\0") or "OMP_NUM_THREADS" in os.environ
    assert "RAY_" not in environ(pid)
    folder = machines.home / ".cache" / "forebay" / "cluster"
    secrets = [(folder / name).read_text() for name in ("cluster.key", "token")]
    logs = [path.read_text(errors="replace") for path in [*folder.rglob("*.log"), *folder.rglob("*.log.1")]]
    running = of_home(machines.home)
    assert len(running) >= 5
    seen = [Path(f"/proc/{each}/cmdline").read_text() + environ(each) for each in running]
    assert not [secret for secret in secrets if secret in "".join([*logs, *seen])]
    assert "server" in machines.run("logs", "server-1", "--lines=3")
    assert "Ray has ended" in machines.run("down")
    assert not is_alive(pid)
    wait_until(lambda: not of_home(machines.home), lambda: str(of_home(machines.home)))


def test_cluster_down_after_the_gcs_has_died_ends_all(machines: Machines, model: Path) -> None:
    machines.run("up", model, *SMALL, f"--port={free_port()}")
    pid = machines.status()["server-1"]["pid"]
    commands = {each: Path(f"/proc/{each}/cmdline").read_text() for each in of_home(machines.home)}
    (gcs,) = (each for each, command in commands.items() if "gcs_server" in command.partition("\0")[0])
    os.kill(gcs, signal.SIGKILL)
    wait_until(lambda: not is_alive(gcs))
    assert is_alive(pid)
    text = machines.run("down")
    assert "Ray does not answer (Ray's GCS does not answer" in text
    assert "Ray has ended" in text
    wait_until(lambda: not of_home(machines.home), lambda: str(of_home(machines.home)))


def test_status_behind_an_up_that_was_killed_says_what_runs_and_down_ends_it(machines: Machines, model: Path) -> None:
    with machines.begin("up", model, *SMALL, "--replicas=2", f"--port={free_port()}") as command:
        for line in command.stdout or ():
            if line.startswith("server-1 on "):
                break
        command.kill()
    text = machines.run("status")
    assert f"forebay cluster up (pid {command.pid} on " in text
    assert "was cut before it had finished: of server-1, server-2, router-1" in text
    assert "was cut before it had finished" in machines.run("up", model, code=2)
    assert "Ray has ended" in machines.run("down")
    wait_until(lambda: not of_home(machines.home), lambda: str(of_home(machines.home)))


def test_servers_that_die_come_back_and_changes_lose_no_request(
    machines: Machines, model: Path, expected: dict[int, list[int]]
) -> None:
    """Rows 1 and 2 of the failures, scaling, and an update of the model, all under load."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    machines.run("up", model, *SMALL, "--replicas=2", f"--port={port}")
    first = machines.status()["server-1"]

    load = machines.load(url, 8)
    time.sleep(1)
    os.kill(first["pid"], signal.SIGKILL)
    second = machines.wait_ready("server-1", after=first["pid"])
    outcomes = load.outcomes()
    assert tokens(outcomes) == expected
    assert codes(outcomes) == set()  # retried on the other server
    assert (second["url"], second["num_starts"]) == (first["url"], 2)
    assert second["instance"] != first["instance"]

    actor = int(Path(f"/proc/{second['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1])
    load = machines.load(url, 8)
    time.sleep(1)
    os.kill(actor, signal.SIGKILL)
    wait_until(lambda: not is_alive(second["pid"]))
    third = machines.wait_ready("server-1", after=second["pid"])
    outcomes = load.outcomes()
    assert codes(outcomes) == set()
    assert tokens(outcomes) == expected
    assert third["url"] != second["url"]

    load = machines.load(url, 12)
    assert "server-2 has drained" in machines.run("scale", "1")
    assert "no node has enough resources" in machines.run("scale", "9", code=1)
    outcomes = load.outcomes()
    assert codes(outcomes) == set()
    assert [*machines.status()] == ["router-1", "server-1"]

    load = machines.load(url, 30)
    text = machines.run("update", model)
    assert text.index("server-2 is ready") < text.index("server-1 has drained")
    outcomes = load.outcomes()
    assert codes(outcomes) == set()
    assert tokens(outcomes) == expected
    assert [*machines.status()] == ["router-1", "server-2"]
    assert "there is no model" in machines.run("update", "/nowhere", code=2)
    machines.run("down")


def test_pair_that_shares_memory_has_the_tokens_of_one_server_and_updates_its_weights(
    machines: Machines, model: Path, expected: dict[int, list[int]]
) -> None:
    port = free_port()
    shared = ("--pd=1p1d", "--disaggregation-transfer-backend=shm", f"--weights-root={model.parent}")
    machines.run("up", model, *SMALL, *shared, f"--port={port}")
    url = f"http://127.0.0.1:{port}"
    assert tokens(machines.load(url, 1).outcomes()) == expected
    load = machines.load(url, 15)
    machines.run("update", f"--weights={model}")
    outcomes = load.outcomes()
    assert codes(outcomes) == set()  # held until the weights are the same again
    assert tokens(outcomes) == expected
    before = machines.status()
    assert {before[name]["weight_version"] for name in ("prefill-1", "decode-1")} == {"1"}
    os.kill(before["decode-1"]["pid"], signal.SIGKILL)  # it loads the new weights again: its peer compares versions
    assert machines.wait_ready("decode-1", after=before["decode-1"]["pid"])["weight_version"] == "1"
    wait_until(lambda: not codes(machines.load(url, 0.1).outcomes()))
    machines.run("down")
