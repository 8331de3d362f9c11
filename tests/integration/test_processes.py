"""Scorecard F-1, F-4, H-2, I-1 and J-1 with the whole tree: processes that die, signals, sockets, crowds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forebay.http.listen import SAME_SIGNAL_S
from tests.deadlines import HANGS_S, NEVER_S, POLL_S, wait_until
from tests.engine.conftest import make_chat_model
from tests.integration.streams import ENDLESS, ask, asyncly, read, under_way
from tests.integration.tree import Tree, alive, serving

CONTEXT = 16384
LONG_PROMPT = [7 + i % 200 for i in range(8000)]
SMALL = (
    "--dtype=float32",
    "--num-threads=1",
    "--kv-cache-bytes=32MiB",
    "--chunked-prefill-size=16",
    # No limit on time ends anything here: who is told of a death is told of it, and not timed out.
    f"--drain-timeout={NEVER_S}",
    f"--request-timeout={NEVER_S}",
)
PATIENT = (*SMALL, f"--stall-timeout={NEVER_S}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough to start at once; its context is long enough for a prefill that lasts for seconds."""
    return make_chat_model(tmp_path_factory.mktemp("model"), context_length=CONTEXT).path


@pytest.fixture
def tree(tmp_path: Path, model: Path) -> Iterator[Tree]:
    with serving(tmp_path / "tree", model, *PATIENT) as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Tree]:
    with serving(
        tmp_path_factory.mktemp("shared") / "tree",
        model,
        *PATIENT,
        "--max-running-requests=4",
        "--max-queued-requests=8",
    ) as started:
        yield started


def victim_of(tree: Tree, who: str) -> int:
    return tree.engine_pid if who == "engine" else tree.server.pid


async def work(tree: Tree, client: httpx.AsyncClient, phase: str) -> list[asyncio.Task[str]]:
    """Requests in the phase named."""
    if phase == "idle":
        return []
    # One prompt takes all of a step, so one prefills and two wait.
    prompt, num_tokens = (LONG_PROMPT, 0) if phase == "prefill" else ([5, 6], 3)
    return await under_way(tree, (read(client, ask([10 + i, *prompt], ENDLESS)) for i in range(3)), num_tokens)


async def drains(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(HANGS_S):
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(POLL_S)


# With engines that compute nothing, of which there can be one for each phase: tests/engine/test_process.py.
@pytest.mark.parametrize(
    ("who", "phase"),
    [
        pytest.param("engine", "idle", marks=pytest.mark.slow),
        pytest.param("engine", "prefill", marks=pytest.mark.slow),
        ("engine", "streaming"),
        ("server", "prefill"),
        pytest.param("server", "streaming", marks=pytest.mark.slow),
    ],
)
async def test_a_killed_process_ends_every_stream_and_the_whole_tree(tree: Tree, who: str, phase: str) -> None:
    pids = [tree.server.pid, tree.engine_pid]
    async with asyncly(tree) as client:
        tasks = await work(tree, client, phase)
        os.kill(victim_of(tree, who), signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not tree.healthy())
        async with asyncio.timeout(HANGS_S):
            texts = await asyncio.gather(*tasks)
    for text in texts:
        assert '"code":"engine_dead"' in text if who == "engine" else "broken" in text
        assert '"finish_reason":"' not in text
    assert tree.server.wait(HANGS_S) != 0
    wait_until(lambda: not any(map(alive, pids)))
    assert list(tree.temporary.iterdir()) == []
    if who == "engine":
        assert "was killed by SIGKILL" in tree.output.splitlines()[-1]
        assert "Traceback" not in tree.output


async def test_an_engine_that_hangs_is_given_up_after_the_stall_timeout(tmp_path: Path, model: Path) -> None:
    """F-3: never a silent wedge. It cannot enforce its requests' limits itself, so whoever watches it does."""
    with serving(tmp_path / "tree", model, *SMALL, "--stall-timeout=3") as tree:
        engine = tree.engine_pid
        async with asyncly(tree) as client:
            tasks = await work(tree, client, "streaming")
            os.kill(engine, signal.SIGSTOP)
            async with asyncio.timeout(HANGS_S):
                texts = await asyncio.gather(*tasks)
        assert all('"code":"engine_dead"' in text for text in texts)
        assert tree.server.wait(HANGS_S) == 1
        assert not alive(engine)
        assert "--stall-timeout" in tree.output.splitlines()[-1]


def test_ctrl_c_while_the_engine_starts_says_nothing(tmp_path: Path, model: Path) -> None:
    tree = Tree(tmp_path / "tree", model, *SMALL, fresh=True)
    try:
        pids = [tree.server.pid, tree.engine_pid]
        os.killpg(tree.server.pid, signal.SIGINT)
        assert tree.server.wait(HANGS_S) in (0, 130)
        wait_until(lambda: not any(map(alive, pids)))
        assert "Traceback" not in tree.output
    finally:
        tree.end()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["engine", pytest.param("server", marks=pytest.mark.slow)])
def test_a_process_killed_while_the_model_loads_takes_the_other_with_it(tmp_path: Path, model: Path, who: str) -> None:
    tree = Tree(tmp_path / "tree", model, *SMALL, fresh=True)
    try:
        pids = [tree.server.pid, tree.engine_pid]
        os.kill(victim_of(tree, who), signal.SIGKILL)
        assert tree.server.wait(HANGS_S) != 0
        wait_until(lambda: not any(map(alive, pids)))
        assert "ready at" not in tree.output
        assert list(tree.temporary.iterdir()) == []
    finally:
        tree.end()


async def test_sigterm_lets_streams_finish_and_refuses_new_requests(tree: Tree) -> None:
    pids = [tree.server.pid, tree.engine_pid]
    async with asyncly(tree) as client:
        tasks = await under_way(tree, (read(client, ask([10 + i], 200)) for i in range(64)))
        (last,) = await under_way(tree, [read(client, ask([9], ENDLESS))])  # the drain is not over before this goes
        # As `timeout` does, to the process and then to its group; but two of a kind at once would arrive as one. It is
        # stopped meanwhile: two that came apart would end it at once.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            tree.server.send_signal(number)
        await drains(client)
        refused = await client.post("/v1/completions", json=ask())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        texts = await asyncio.gather(*tasks)
        last.cancel()
    for text in texts:
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        assert "error" not in text
    assert tree.server.wait(HANGS_S) == 0
    assert not any(map(alive, pids))
    assert "Traceback" not in tree.output


@pytest.mark.slow  # tests/server/test_signals.py does it every time, without an engine's process
async def test_a_second_signal_forces_the_end_and_says_so_to_clients(tree: Tree) -> None:
    engine = tree.engine_pid
    async with asyncly(tree) as client:
        tasks = await work(tree, client, "streaming")
        tree.server.send_signal(signal.SIGTERM)
        await drains(client)
        await asyncio.sleep(2 * SAME_SIGNAL_S)  # sooner it would be taken for the same signal
        tree.server.send_signal(signal.SIGTERM)
        texts = await asyncio.gather(*tasks)
    assert tree.server.wait(HANGS_S) == 0
    assert not alive(engine)
    assert all('"code":"shutting_down"' in text for text in texts)


async def test_ctrl_c_ends_the_tree_quietly(tree: Tree) -> None:
    """A terminal sends it to the whole process group, engine included: the engine leaves it to its parent."""
    engine = tree.engine_pid
    async with asyncly(tree) as client:
        (task,) = await under_way(tree, [read(client, ask([5], 300))], num_tokens=5)
        os.killpg(tree.server.pid, signal.SIGINT)
        assert (await task).endswith("data: [DONE]\n\n")
    assert tree.server.wait(HANGS_S) in (0, 130)
    assert not alive(engine)
    assert "Traceback" not in tree.output


def listeners(pids: list[int]) -> list[tuple[str, str]]:
    """(address:port in hex, table) of what these processes listen on, and the paths of their unix sockets."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (table.startswith("udp") or fields[3] == "0A"):
                found.append((fields[1], table))
    for line in Path(f"/proc/{pids[0]}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and len(fields) > 7:
            found.append((fields[7], "unix"))
    return found


def test_there_is_one_listener_on_loopback_and_no_socket_file(shared: Tree) -> None:
    assert listeners([shared.server.pid, shared.engine_pid]) == [(f"0100007F:{shared.port:04X}", "tcp")]
    assert list(shared.temporary.iterdir()) == []


@pytest.mark.parametrize("prompt", [[5, 6], LONG_PROMPT], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_gives_its_pages_back(shared: Tree, prompt: list[int], stream: bool) -> None:
    aborted = shared.counted("finished.abort")
    num_tokens = 3 if prompt is not LONG_PROMPT else 0
    async with asyncly(shared) as client:
        body = ask(prompt, ENDLESS, stream=stream)
        (request,) = await under_way(shared, [client.post("/v1/completions", json=body)], num_tokens)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    wait_until(lambda: shared.counted("finished.abort") == aborted + 1)
    wait_until(shared.is_clean)


async def test_a_client_that_leaves_with_several_choices_ends_all_of_them(shared: Tree) -> None:
    async with asyncly(shared) as client:
        body = ask(["one", "two"], ENDLESS, n=2, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
    wait_until(shared.is_clean)


async def test_requests_over_the_cap_get_429_with_retry_after_and_leave_no_state(shared: Tree) -> None:
    """E-3 in small: 4 run, 8 wait, the others are refused at once; then service goes on as before."""
    async with asyncly(shared) as client:
        before = (await client.post("/v1/completions", json=ask("steady", 16))).json()["choices"][0]["text"]
        crowd = [client.post("/v1/completions", json=ask([5 + i, 9], 100)) for i in range(60)]
        assert (await client.post("/pause_generation", json={})).status_code == 200  # nobody ends before all have come
        taken = await under_way(shared, crowd[:12])
        for refused in await asyncio.gather(*crowd[12:]):
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"]
        assert (await client.post("/continue_generation")).status_code == 200
        for answer in await asyncio.gather(*taken):
            assert answer.json()["usage"]["completion_tokens"] == 100
        wait_until(shared.is_clean)
        after = (await client.post("/v1/completions", json=ask("steady", 16))).json()["choices"][0]["text"]
    assert after == before
    for name in ("kv", "rows"):
        pool = shared.pool(name)
        assert pool["free"] + pool["cached"] == pool["total"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["server", "engine"])
async def test_a_tree_that_was_stopped_for_longer_than_the_stall_timeout_goes_on(
    tmp_path: Path, model: Path, first: str
) -> None:
    """A paused container, a machine that moved: the engine was not silent, and no request stood still."""
    with serving(tmp_path / "tree", model, *SMALL, "--stall-timeout=4") as tree:
        pids = [victim_of(tree, first), victim_of(tree, "server" if first == "engine" else "engine")]
        async with asyncly(tree) as client:
            begun = asyncio.Event()
            task = asyncio.create_task(read(client, ask([5], 4000), begun))
            await begun.wait()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(8)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.05)
            assert (await client.get("/health")).status_code == 200
            text = await task
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text


@pytest.mark.slow  # tests/server/test_lifecycle.py does it every time, by a clock of its own
async def test_health_does_not_call_an_engine_well_that_was_stopped_while_it_worked(
    tmp_path: Path, model: Path
) -> None:
    with serving(tmp_path / "tree", model, *PATIENT) as tree:
        engine = tree.engine_pid
        async with asyncly(tree) as client:
            tasks = await work(tree, client, "streaming")
            os.kill(engine, signal.SIGSTOP)
            await asyncio.to_thread(wait_until, lambda: not tree.healthy())
            assert not any(task.done() for task in tasks)  # the stall timeout is far away
            os.kill(engine, signal.SIGCONT)
            await asyncio.to_thread(wait_until, tree.healthy)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
