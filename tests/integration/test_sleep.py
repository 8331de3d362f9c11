"""The whole tree asleep and awake again: under streams, a hundred times, killed, woken by a crowd, of other weights."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.deadlines import HANGS_S, POLL_S, wait_until
from tests.integration.streams import ENDLESS, ask, asyncly, read, under_way
from tests.integration.test_processes import PATIENT, model
from tests.integration.tree import Tree, alive, serving

__all__ = ["model"]  # a fixture
ALL = ["kv_cache", "weights", "cuda_graph"]
ROWS = 8
LENGTH = '"finish_reason":"length"'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Where weights may come from."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(model, folder / "same")
    shutil.copytree(model, folder / "other")
    for file in (folder / "other").glob("*.safetensors"):
        save_file({name: value * 0.75 for name, value in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, model: Path, root: Path) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("sleeping") / "tree"
    with serving(folder, model, *PATIENT, f"--weights-root={root}", f"--max-running-requests={ROWS}") as started:
        yield started


def post(tree: Tree, path: str, **body: Any) -> httpx.Response:
    with tree.client() as client:
        return client.post(path, json=body)


def completion(tree: Tree, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = post(tree, "/v1/completions", **ask([5, 6, 7], 12, **fields)).json()
    return answer


@pytest.mark.parametrize(
    ("mode", "num_tokens"), [pytest.param("wait", 200, marks=pytest.mark.slow), ("retract", 200), ("abort", ENDLESS)]
)
async def test_a_sleep_under_streams_costs_no_token_or_ends_them_typed(tree: Tree, mode: str, num_tokens: int) -> None:
    async with asyncly(tree) as client:
        running = await under_way(tree, (read(client, ask([10 + i, 5, 6], num_tokens)) for i in range(ROWS)), ROWS)
        waiting = await under_way(tree, (read(client, ask([40 + i, 5, 6], 60)) for i in range(24)))
        answer = (await client.post("/release_memory_occupation", json={"mode": mode})).json()
        assert (answer["phase"], answer["released"]) == ("asleep", ALL)
        assert (await client.get("/health")).json() == {"status": "ok", "reason": "asleep"}
        assert (await client.get("/ready")).status_code == 503
        assert all(
            pool["cached"] == pool["running"] == 0 for pool in (await client.post("/flush_cache")).json()["pools"]
        )
        refused = await client.post("/release_memory_occupation", json={"tags": ["weights"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "released")
        assert (await client.post("/resume_memory_occupation", json={})).json()["phase"] == "serving"
        async with asyncio.timeout(HANGS_S):
            texts = [await asyncio.gather(*tasks) for tasks in (running, waiting)]
    for each, end in zip(texts, ('"code":"aborted"' if mode == "abort" else LENGTH, LENGTH), strict=True):
        assert all(end in text for text in each)
    wait_until(tree.is_clean)


def test_a_paused_engine_lets_requests_wait_and_goes_on(tree: Tree) -> None:
    right = completion(tree)["choices"]
    with tree.client() as client:
        assert client.post("/pause_generation", json={"mode": "retract"}).json()["phase"] == "asleep"
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post("/continue_generation").json()["phase"] == "serving"
        assert client.post("/continue_generation").status_code == 409
        assert client.post("/sleep", params={"level": 1}).json()["released"] == ["kv_cache", "cuda_graph"]
        assert client.post("/wake_up", params={"tags": ["cuda_graph"]}).json()["released"] == ["kv_cache"]
        assert client.post("/wake_up").json()["phase"] == "serving"
        assert client.post("/release_memory_occupation", json={"tags": ["all"]}).status_code == 400
        assert client.post("/release_memory_occupation", json={"mode": "never"}).status_code == 400
    answer = completion(tree)
    assert answer["choices"] == right
    assert answer["usage"]["cache"]["miss_reason"] in ("released", "below_page")


def held(pid: int) -> tuple[int, int]:
    """Resident KiB and open files."""
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return resident, len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_a_hundred_sleeps_leave_memory_and_files_as_they_were(tree: Tree) -> None:
    right, levels = completion(tree)["choices"], []
    with tree.client() as client:
        for sleep in range(100):
            assert client.post("/sleep", params={"level": 2}).status_code == 200
            assert client.post("/wake_up").status_code == 200
            if sleep in (20, 99):
                assert completion(tree)["choices"] == right
                levels.append(held(tree.engine_pid))
    (before, files), (after, files_after) = levels
    assert files_after == files
    assert after - before < 4096, f"{before} KiB after 20 sleeps, {after} after 100"


async def test_weights_change_under_load_and_every_answer_is_of_one_version(tree: Tree) -> None:
    async with asyncly(tree) as client:
        body = ask([9, 8, 7], 100)
        whole = await under_way(tree, (client.post("/v1/completions", json=body) for _ in range(4 * ROWS)), ROWS)
        changed = await client.post("/update_weights_from_disk", json={"model_path": "other", "mode": "retract"})
        assert changed.json()["weight_version"] == 1
        answers = [(await task).json() for task in whole] + [(await client.post("/v1/completions", json=body)).json()]
        texts: dict[int, set[str]] = {}
        for answer in answers:
            texts.setdefault(answer["usage"]["weight_version"], set()).add(answer["choices"][0]["text"])
        assert {version: len(found) for version, found in texts.items()} in ({1: 1}, {0: 1, 1: 1})
        assert (await client.get("/server_info")).json()["weight_version"] == "1"
        for path in ("../other", "/etc", "nothing-here"):
            assert (await client.post("/update_weights_from_disk", json={"model_path": path})).status_code >= 400
        back = await client.post("/update_weights_from_disk", json={"model_path": "same"})
        assert back.json()["weight_version"] == 2
        assert "forebay:weight_version 2.0" in (await client.get("/metrics")).text


async def test_a_crowd_wakes_an_idle_server_once_and_a_killed_one_stays_dead(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "tree", model, *PATIENT, "--sleep-idle-seconds=0.5") as tree:
        async with asyncly(tree) as client:
            right = (await client.post("/v1/completions", json=ask([5, 6, 7], 12))).json()["choices"]
            async with asyncio.timeout(HANGS_S):
                while (await client.get("/health")).json()["reason"] != "asleep":
                    await asyncio.sleep(POLL_S)
            assert (await client.get("/ready")).status_code == 200  # a request would be taken
            wants = [client.post("/v1/completions", json=ask([5, 6, 7], 12)) for _ in range(64)]
            answers = await asyncio.gather(*wants)
            assert [answer.json()["choices"] for answer in answers] == [right] * 64
            assert tree.output.count("event=resumed") <= 1 + tree.output.count("event=asleep")
            await client.post("/sleep", params={"level": 2})  # unless it does already
            assert (await client.get("/health")).json()["reason"] == "asleep"
            pids = [tree.server.pid, tree.engine_pid]
            os.kill(tree.engine_pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: not any(map(alive, pids)))


async def test_engine_killed_while_waking_fails_requests_typed_and_ends_all_processes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.load_again=kill@3")  # some weights are there again, the others are not
    with serving(tmp_path / "tree", model, *PATIENT) as tree:
        pids = [tree.server.pid, tree.engine_pid]
        async with asyncly(tree) as client:
            assert (await client.post("/sleep", params={"level": 2})).json()["phase"] == "asleep"
            (waits,) = await under_way(tree, [read(client, ask([5, 6, 7], 12))])
            async with asyncio.timeout(HANGS_S):
                answer = await client.post("/wake_up")
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
                assert '"code":"engine_dead"' in await waits
            await asyncio.to_thread(wait_until, lambda: not any(map(alive, pids)))
        assert tree.server.wait(HANGS_S) != 0
