"""Scorecard I-4: two replicas restarted one after the other under traffic, and what is of another version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.base.variants import Variant
from forebay.config.sources import from_file
from forebay.engine.channel import ChannelError, FrameDecoder
from forebay.engine.frames import AddRequest, Configure, ToEngine
from forebay.ops import compiler
from forebay.ops.compiler import BuildError, library
from forebay.requests.sampling_params import SamplingParams
from tests import loopback
from tests.deadlines import HANGS_S
from tests.engine.conftest import make_chat_model
from tests.engine.engine_fakes import CONFIG
from tests.fuzz.test_frames import body_of, sound
from tests.integration.tree import Tree

FLAGS = ("--dtype=float32", "--num-threads=1", "--kv-cache-bytes=16MiB", "--drain-timeout=60")
CLIENTS, ENOUGH = 8, 500


class Proxy:
    """TCP to whichever replica takes the connection: it knows nothing of HTTP, of health, or of restarts."""

    def __init__(self) -> None:
        self.replicas: list[Tree] = []
        self._next = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await self._connect()
        if there is not None:
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        self._next += 1
        first = self._next % len(self.replicas)
        for replica in [*self.replicas[first:], *self.replicas[:first]]:
            try:
                return await asyncio.open_connection("127.0.0.1", replica.port)
            except OSError:
                continue  # nobody listens: nothing was sent
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Tree]]:
    model = make_chat_model(tmp_path / "model", context_length=512).path
    started = [Tree(tmp_path / f"replica{i}", model, *FLAGS) for i in range(2)]
    yield started
    for tree in started:
        tree.end()


@pytest.mark.slow
async def test_i4_a_rolling_restart_loses_no_request_of_a_client_that_retries_on_503(
    replicas: list[Tree], tmp_path: Path
) -> None:
    proxy = Proxy()
    for tree in replicas:
        await asyncio.to_thread(tree.wait_ready)
    proxy.replicas = list(replicas)
    done, retries, restarted = 0, 0, asyncio.Event()
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    async def client(url: str, texts: set[str]) -> None:
        nonlocal done, retries
        while done < ENOUGH or not restarted.is_set():
            # A connection for each request: what is kept alive stays with its replica.
            async with loopback.async_client(base_url=url) as http:
                response = await http.post("/v1/completions", json=body)
            if response.status_code == 503:
                retries += 1
                await asyncio.sleep(0.05)
                continue
            assert response.status_code == 200, response.text
            texts.add(response.json()["choices"][0]["text"])
            done += 1

    async def restart() -> None:
        for number, tree in enumerate(list(replicas)):
            tree.server.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(tree.server.wait, HANGS_S) == 0
            again = Tree(tmp_path / f"again{number}", tmp_path / "model", *FLAGS)
            replicas.append(again)
            await asyncio.to_thread(again.wait_ready)
            proxy.replicas[number] = again
        restarted.set()

    texts: set[str] = set()
    async with proxy.listening() as url, asyncio.TaskGroup() as tasks:
        tasks.create_task(restart())
        for _ in range(CLIENTS):
            tasks.create_task(client(url, texts))
    assert done >= ENOUGH
    assert len(texts) == 1
    assert not any("Traceback" in tree.output for tree in replicas)


# -- of another version -------------------------------------------------------------------------------------------


def decoded(body: dict[str, object]) -> object:
    (frame,) = FrameDecoder(ToEngine).feed(sound([msgspec.msgpack.encode(body)]))
    return frame


@pytest.mark.parametrize("missing", ["config", "config.memory", "config.memory.page_size"])
def test_i4_a_frame_of_a_peer_that_lacks_a_field_is_refused_by_name(missing: str) -> None:
    body = msgspec.msgpack.decode(body_of(Configure(CONFIG)))
    *path, name = missing.split(".")
    inside = body
    for step in path:
        inside = inside[step]
    del inside[name]
    with pytest.raises(ChannelError, match=f"missing required field `{name}`"):
        decoded(body)


def test_i4_a_frame_of_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(ChannelError, match="Invalid value 'add_v2'"):
        decoded({**msgspec.msgpack.decode(body_of(Configure(CONFIG))), "type": "add_v2"})


def test_i4_a_field_of_another_meaning_is_refused() -> None:
    """A number where there was a list: never taken for something it is not."""
    frame = AddRequest(request_id=1, prompt_token_ids=[1], params=SamplingParams())
    body = {**msgspec.msgpack.decode(body_of(frame)), "prompt_token_ids": 7}
    with pytest.raises(ChannelError, match="prompt_token_ids"):
        decoded(body)


def test_i4_a_key_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("page_sise = 4\n")
    with pytest.raises(ConfigError, match=r"page_sise.*page_size"):
        from_file(file)


def test_i4_what_another_version_compiled_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variant = Variant(name="pool", needs=frozenset(), flags=())
    monkeypatch.setattr(compiler, "CACHE", tmp_path)
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    (tmp_path / "pool-0123456789abcdef-01234567.so").write_bytes(b"of another version")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found"):
        library(variant)
