"""No test asserts a clock: how fast things are depends on the machine and on who else is using it.

A property is said in counts, order or modules; what is measured, `make bench-limits` measures; and who waits for
something waits for `deadlines.HANGS_S`, which means that it never comes.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.deadlines import HANGS_S
from tests.imports import walk

TESTS = Path(__file__).parent

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"}
CLOCKS |= {"thread_time", "thread_time_ns", "getrusage"}
WAITS = {"wait", "join", "result", "wait_for", "timeout", "settimeout", "until"}
IMPATIENT = {"get", "post", "stream", "request", "Client", "AsyncClient"}  # of httpx: each gives up after five seconds

# A text without any of these has no finding, and is not parsed. Texts are joined from lists and calls.
SUSPECT = re.compile(
    rf"\b({'|'.join(sorted(CLOCKS))}|timeout|httpx)\b"
    rf"|\b({'|'.join(sorted(WAITS - {'join', 'timeout'}))})\s*\(\s*[^)\s]|\bjoin\s*\(\s*[\w.]+\s*\)"
)

# Each line reviewed: (file, what is found in it).
ALLOWED = {
    ("deadlines.py", "time.monotonic"),  # the deadline itself
    ("server/caching_engine.py", "time.monotonic"),  # what a state says of its age
    ("server/crowds.py", "time.perf_counter"),  # for benchmarks/limits.py
    ("server/crowds.py", "timeout=0.2"),  # these two poll
    ("server/crowds.py", "timeout=0.05"),
    ("server/crowds.py", "timeout=0.01"),
    ("transfer/scripted.py", "wait(0.1)"),  # between beats
    ("simulation/command_line.py", "time.monotonic"),  # it says how long it took
    ("engine/test_channel.py", "resource.getrusage"),  # memory
    ("soak/soak.py", "time.monotonic"),  # how long it goes on
    ("integration/test_pd_soak.py", "time.monotonic"),
    ("integration/adapter_soak.py", "time.monotonic"),
    ("soak/test_soak.py", "time.monotonic"),
}


def findings(source: str) -> Iterator[str]:
    """Clocks that are read, and waiting that ends before what never comes is known never to come."""
    if not SUSPECT.search(source):
        return
    tree = ast.parse(source)
    named = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in CLOCKS and ast.unparse(node.value) in ("time", "resource"):
                yield ast.unparse(node)
            case ast.ImportFrom(module="time" | "resource", names=names):
                yield from (f"{node.module}.{alias.name}" for alias in names if alias.name in CLOCKS)
            case ast.Call(func=function, args=args, keywords=keywords):
                called = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
                if called in WAITS:
                    yield from (f"{called}({ast.unparse(arg)})" for arg in args if is_too_short(arg, named))
                limits = (keyword.value for keyword in keywords if keyword.arg == "timeout")
                yield from (f"timeout={ast.unparse(limit)}" for limit in limits if is_too_short(limit, named))
                if called in IMPATIENT and ast.unparse(function) == f"httpx.{called}":
                    yield f"httpx.{called}, not loopback.py's"


def is_too_short(node: ast.expr, named: dict[str, ast.expr]) -> bool:
    match node:
        case ast.Name(id=name) if name in named:
            return is_too_short(named[name], {})
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float() as seconds):
            return 0 < seconds < HANGS_S
    return False


@pytest.mark.parametrize(
    "source",
    [
        "import time\nassert time.monotonic() - started < 1",
        "from time import perf_counter",
        "took = time.process_time()",
        "client = Client(timeout=20)",
        "process.wait(10)",
        "async with asyncio.timeout(5.0):\n    pass",
        "await asyncio.wait_for(engine.died(), 3)",
        "LIMIT_S = 10.0\nthread.join(LIMIT_S)",
        "with httpx.Client(base_url=url) as http:\n    pass",
    ],
)
def test_each_way_to_be_late_is_found(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source", ["process.wait(HANGS_S)", "channel.receive(timeout=0)", "event.wait()", "time.sleep(1)"]
)
def test_what_is_never_late_is_not(source: str) -> None:
    assert not list(findings(source))


def test_no_test_reads_a_clock_or_gives_up_early() -> None:
    found = {
        (str(path.relative_to(TESTS)), what)
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for what in findings(path.read_text())
    }
    assert found == ALLOWED


def give_up_soon() -> None:
    """Interrupt what this thread does next, and again if on a busy machine the first alarm came before that began."""
    signal.setitimer(signal.ITIMER_REAL, 0.01, 5.0)


async def never() -> None:
    """Wait for ever. The timer begins here: before the loop runs, it would leave a coroutine that nobody awaits."""
    give_up_soon()
    await asyncio.Event().wait()


WAITING: dict[str, Callable[[], object]] = {
    "a pipe": lambda: (give_up_soon(), os.read(os.pipe()[0], 1)),
    "a child": lambda: (give_up_soon(), subprocess.run(["sleep", "infinity"])),
    "a thread": lambda: (give_up_soon(), threading.Event().wait()),
    "an event loop": lambda: asyncio.run(never()),
    "uvloop": lambda: uvloop.run(never()),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING)
def test_who_waits_for_what_never_comes_fails_in_the_end(wait: Callable[[], object]) -> None:
    assert signal.getitimer(signal.ITIMER_REAL)[0] > HANGS_S
    with pytest.raises(SystemExit, match="never comes"):
        wait()
