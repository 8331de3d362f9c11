"""Several ranks behind HTTP: the answers of one, and one end for all whichever process is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANGS_S, wait_until
from tests.engine.test_sleep import other_weights
from tests.integration.streams import ENDLESS, ask, asyncly
from tests.integration.test_processes import PATIENT, SMALL, model, work
from tests.integration.tree import Tree, alive, child, children, command, serving
from tests.kernels import VARIANTS

__all__ = ["model"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU")]

SIZE = 2
PHASES = ("idle", "prefill", "streaming", "asleep")


def ranks_of(tree: Tree) -> list[int]:
    """The processes of all ranks, in their order."""
    engine = tree.engine_pid
    child(engine, "forebay.engine.loop.rank")
    others = [pid for pid in children(engine) if "forebay.engine.loop.rank" in command(pid)]
    return [engine, *sorted(others)]


def files_of_ranks(pids: Iterable[str | int]) -> set[int]:
    """The files of memory, in no directory, that these processes have open for their ranks, as inodes."""
    found = set()
    for pid in pids:
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if "memfd:forebay-" in os.readlink(fd):
                    found.add(fd.stat().st_ino)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is another user's
    return found


async def ends(tree: Tree, pids: list[int], tasks: list[asyncio.Task[str]], files: set[int]) -> None:
    """All processes end, no process has their files, and all clients have an error with a type."""
    async with asyncio.timeout(HANGS_S):
        texts = await asyncio.gather(*tasks)
    assert all('"code":"engine_dead"' in text and '"finish_reason":"' not in text for text in texts), texts
    assert tree.server.wait(HANGS_S) != 0
    wait_until(lambda: not any(map(alive, pids)))
    assert files
    assert not files & files_of_ranks(each.name for each in Path("/proc").iterdir() if each.name.isdigit())
    assert list(tree.temporary.iterdir()) == []


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("phase", PHASES)
async def test_rank_that_is_killed_ends_all_and_clients_get_typed_errors(
    tmp_path: Path, model: Path, phase: str, rank: int
) -> None:
    with serving(tmp_path / "tree", model, *PATIENT, f"--tp-size={SIZE}") as tree:
        pids = [tree.server.pid, *ranks_of(tree)]
        files = files_of_ranks(pids)
        async with asyncly(tree) as client:
            if phase == "asleep":
                assert (await client.post("/release_memory_occupation", json={})).status_code == 200
                tasks = []
            else:
                tasks = await work(tree, client, phase)
            os.kill(pids[1 + rank], signal.SIGKILL)
            await ends(tree, pids, tasks, files)
    if rank:
        assert f'rank_lost reason="rank {rank} has ended: SIGKILL"' in tree.output


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("phase", PHASES)
async def test_rank_that_is_stopped_ends_all_after_the_stall_timeout(
    tmp_path: Path, model: Path, phase: str, rank: int
) -> None:
    with serving(tmp_path / "tree", model, *SMALL, f"--tp-size={SIZE}", "--stall-timeout=3") as tree:
        pids = [tree.server.pid, *ranks_of(tree)]
        files = files_of_ranks(pids)
        async with asyncly(tree) as client:
            tasks = await work(tree, client, phase if phase in ("prefill", "streaming") else "idle")
            os.kill(pids[1 + rank], signal.SIGSTOP)
            if phase == "idle":
                tasks = [asyncio.create_task(text_of(client, "/v1/completions", ask([5], ENDLESS)))]
            if phase == "asleep":
                tasks = [asyncio.create_task(text_of(client, "/release_memory_occupation", {}))]
            await ends(tree, pids, tasks, files)


async def text_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    return (await client.post(path, json=body)).text


def told(tree: Tree, other: Path) -> list[Any]:
    """Answers when cold, from the cache, after a flush, after a sleep, and with other weights."""
    found = []
    with tree.client() as client:

        def post(path: str, body: dict[str, Any]) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer

        def answers() -> None:
            for number in range(4):
                drawn: dict[str, Any] = {"temperature": 1.1, "seed": number} if number % 2 else {"temperature": 0}
                body = ask([5, 6, 7, *range(20, 40 + number)], 12, logprobs=3, **drawn)
                (choice,) = post("/v1/completions", body).json()["choices"]
                found.append((choice["text"], choice["logprobs"]))

        answers()
        answers()
        for path, body in (
            ("/flush_cache", {}),
            ("/release_memory_occupation", {}),
            ("/resume_memory_occupation", {}),
            ("/update_weights_from_disk", {"model_path": str(other)}),
        ):
            post(path, body)
            if "release" not in path:
                answers()
    return found


def test_ranks_over_http_answer_as_one_to_the_bit(tmp_path: Path, model: Path) -> None:
    other = other_weights(model, tmp_path / "weights" / "other")
    root = f"--weights-root={other.parent}"
    with (
        serving(tmp_path / "one", model, *PATIENT, root) as one,
        serving(tmp_path / "ranks", model, *PATIENT, root, f"--tp-size={SIZE}") as ranks,
    ):
        assert len(ranks_of(ranks)) == SIZE
        assert told(ranks, other) == told(one, other)
        assert ranks.counted("cached_tokens") > 0
