"""Calls beside the event loop: limited in number, and none of them keeps anybody from going on."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from forebay.base.errors import InvalidRequest, Overloaded
from forebay.http import preparation, workers
from forebay.http.preparation import Preparation, staying_client
from forebay.http.workers import INLINE_CHARS, TextWorkers, Workers
from tests.deadlines import HANGS_S


def pool_of(num_threads: int, **limits: int) -> Workers:
    return Workers(Preparation({}).lane("test", num_threads, **limits))


@asynccontextmanager
async def stuck(pool: Workers, count: int = 1) -> AsyncIterator[None]:
    """`count` calls that do not end before this does."""
    release, begun = threading.Event(), [asyncio.Event() for _ in range(count)]
    loop = asyncio.get_running_loop()

    def call(number: int) -> None:
        loop.call_soon_threadsafe(begun[number].set)
        release.wait(HANGS_S)

    tasks = [asyncio.create_task(pool.run(staying_client(), lambda i=i: call(i))) for i in range(count)]  # type: ignore[misc]
    for event in begun:
        await event.wait()
    yield
    release.set()
    await asyncio.gather(*tasks)


def test_a_call_returns_or_raises_what_its_function_does() -> None:
    async def main() -> None:
        pool = pool_of(2)
        assert await pool.run(staying_client(), lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await pool.run(staying_client(), lambda: 1 // 0)
        with pytest.raises(SystemExit):
            await pool.run(staying_client(), sys.exit)
        assert await pool.run(staying_client(), lambda: 8) == 8
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, INLINE_CHARS + 1], ids=["in place", "in a thread"])
def test_text_error_that_is_not_typed_is_a_refusal_and_logged(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        pool = TextWorkers(Preparation({}))
        with pytest.raises(InvalidRequest, match="could not be tokenized") as refused:
            await pool.run(staying_client(), lambda: 1 // 0, size=size)
        assert refused.value.code == "tokenizer_error"
        assert caplog.messages == ["tokenizer_failed kind=ZeroDivisionError"]
        with pytest.raises(Overloaded, match="as it is"):
            await pool.run(staying_client(), partial(_raise, Overloaded("as it is")), size=size)
        assert len(caplog.messages) == 1
        pool.close()

    asyncio.run(main())


def _raise(error: BaseException) -> None:
    raise error


def test_text_that_finds_no_worker_in_time_raises_overloaded(monkeypatch) -> None:
    """What a text may take is bounded before: the client has nothing to mend, and its request may be sent again."""
    monkeypatch.setattr(workers, "TIMEOUT_S", 0.0)
    release = threading.Event()

    async def main() -> None:
        pool = TextWorkers(Preparation({}))
        with pytest.raises(Overloaded) as told:
            await pool.run(staying_client(), release.wait, size=workers.INLINE_CHARS + 1)
        assert told.value.code == "tokenizer_timeout"
        pool.close()

    asyncio.run(main())
    release.set()


def test_the_queue_has_an_end() -> None:
    async def main() -> None:
        pool = pool_of(2, max_waiting=3)
        async with stuck(pool, 2):
            waiting = [asyncio.create_task(pool.run(staying_client(), lambda: 1)) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="3 requests wait for a free test worker"):
                await pool.run(staying_client(), lambda: 1)
            assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == [1, 1, 1]
        assert await pool.run(staying_client(), lambda: 1) == 1
        pool.close()

    asyncio.run(main())


def test_workers_waiting_call_times_out_and_cancelled_call_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_WAIT_S", 0.01)
    done = []

    async def main() -> None:
        pool = pool_of(1)
        async with stuck(pool):
            with pytest.raises(Overloaded, match="no test worker came free"):
                await pool.run(staying_client(), lambda: done.append(1))
            gone = asyncio.create_task(pool.run(staying_client(), lambda: done.append(2)))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        monkeypatch.setattr(preparation, "MAX_WAIT_S", 60)
        await pool.run(staying_client(), lambda: done.append(3))
        pool.close()

    asyncio.run(main())
    assert done == [3]


def test_a_call_over_its_time_is_left_to_itself() -> None:
    async def main() -> None:
        pool = pool_of(2)
        release = threading.Event()
        with pytest.raises(TimeoutError):
            await pool.run(staying_client(), lambda: release.wait(HANGS_S), 0.01)
        assert await pool.run(staying_client(), lambda: 1, 60) == 1
        release.set()
        pool.close()

    asyncio.run(main())


@pytest.mark.long
def test_nothing_of_a_call_stays_with_its_thread() -> None:
    class Large:
        pass

    async def main() -> None:
        pool = pool_of(1)
        given, made = Large(), await pool.run(staying_client(), Large)
        await pool.run(staying_client(), partial(id, given))
        left = [weakref.ref(given), weakref.ref(made)]
        del given, made
        for _ in range(100):
            gc.collect()
            if not any(ref() for ref in left):
                break
            await asyncio.sleep(0.01)
        assert not any(ref() for ref in left)
        pool.close()

    asyncio.run(main())


def test_a_call_that_never_ends_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import asyncio, contextlib, threading\n"
        "from forebay.http.preparation import Preparation, staying_client\n"
        "from forebay.http.workers import Workers\n"
        "async def main():\n"
        "    with contextlib.suppress(TimeoutError):\n"
        "        await Workers(Preparation({}).lane('test', 1)).run(staying_client(), threading.Event().wait, 0.01)\n"
        "asyncio.run(main())\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout == "over\n"
