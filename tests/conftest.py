"""For the whole suite: nothing leaves this machine, a hang prints its stacks, and the embedded model is found."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Generator, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from forebay.base.cpu import Cpu, this_cpu
from forebay.base.errors import ModelError
from forebay.base.variants import VARIANTS
from forebay.config.gpu import gpu_memory
from forebay.formats.store import find_model
from tests.deadlines import HANGS_S, Watchdog
from tests.imports import SYNTAX_TREES
from tests.integration.forked import close_stock, start_engine
from tests.tiers import LONG_S, SHORT_PERCENT, SHORT_TIER, thin, unmarked_long

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the first takes least CPU

os.environ.update(this_cpu().library_limits)  # torch reads them when it first computes

# Triton looks at it when a kernel is defined, its own among them, and transformers imports Triton too.
HAS_GPU = gpu_memory() is not None
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Both are clocks: an example may take as long as the machine takes for it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short tier", settings.get_profile("any machine"), max_examples=SHORT_PERCENT)
settings.load_profile("any machine")

faulthandler.enable()
if "PYTEST_XDIST_WORKER" in os.environ and "coverage" not in sys.modules:
    # Behind all that is registered later: the end of an interpreter collects what thousands of tests have left.
    atexit.register(os._exit, 0)
_guarding = False
_watchdog = Watchdog()
_LOGGER = logging.getLogger("forebay")
_LOGGER_STATE = _LOGGER.handlers[:], _LOGGER.level, _LOGGER.propagate


def _deny_outside(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: also what extension modules do through Python's sockets is seen. Hooks cannot be taken off."""
    if not _guarding or event not in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        return
    host = arguments[0] if event == "socket.getaddrinfo" else _host(arguments[1])
    if not is_local(host):
        raise PermissionError(f"a test tried to reach {host!r}: the suite must work without a network")


def _host(address: Any) -> Any:
    return address[0] if isinstance(address, tuple) else None  # a unix socket's address is no tuple


def is_local(host: Any) -> bool:
    if host in (None, "", b"", "localhost", socket.gethostname()):
        return True
    try:
        return ip_address(host if isinstance(host, str) else bytes(host).decode()).is_loopback
    except ValueError:
        return False


sys.addaudithook(_deny_outside)


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported, which read the number of examples."""
    if config.option.markexpr == SHORT_TIER:
        settings.load_profile("short tier")


def _import_in_turn(root: Path) -> None:
    """Import the modules of tests before they are collected, in each worker of xdist beginning with another one.

    In a new clone the first to import a module rewrites its assertions, which takes half the time of the import, and
    stores the bytecode. Workers that all began with the same module would each rewrite every one.
    """
    worker, count = os.getenv("PYTEST_XDIST_WORKER", "gw0"), int(os.getenv("PYTEST_XDIST_WORKER_COUNT", "1"))
    files = sorted((root / "tests").rglob("test_*.py"))
    first = len(files) * int(worker.removeprefix("gw")) // count
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection reports it
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Of thousands of tests nothing is garbage, neither while they are collected, which takes a third less time so, nor
    later."""
    gc.disable()
    try:
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            _import_in_turn(session.config.rootpath)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # once all have added their parameters
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    yield
    thin(metafunc, has_gpu=HAS_GPU)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m gpu` is all there is to run on a machine with a GPU; elsewhere those tests are skipped."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tensors of tests are small and the machine is full: torch's threads would wait for each other, for forty times as
    long as the work takes. What an engine sets is for its test."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _hangs(*_: object) -> NoReturn:
    raise SystemExit("this never comes")  # which event loops pass on, of uvloop nothing else


signal.signal(signal.SIGALRM, _hangs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A hang prints its stacks and then fails, wherever this thread waits: for a child's line, a socket, a thread, an
    event. Where its fixtures hang, too, they fail in turn."""
    limit_s = HANGS_S * (20 if item.get_closest_marker("slow") else 1)
    _watchdog.begin(limit_s)
    signal.signal(signal.SIGALRM, _hangs)  # an event loop in the last test may have left the system's handler
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s, HANGS_S)  # a wait with a deadline of its own says more
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _restore_logging()


def _restore_logging() -> None:
    """Undo `setup_logging` of a command that ran in this process: `caplog` of a later test would see nothing."""
    _LOGGER.handlers[:], _LOGGER.propagate = _LOGGER_STATE[0], _LOGGER_STATE[2]
    if _LOGGER.level != _LOGGER_STATE[1]:
        _LOGGER.setLevel(_LOGGER_STATE[1])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Information for who adds a test: a busy machine lists more."""
    reports = [report for kind in ("passed", "failed", "") for report in terminalreporter.stats.get(kind, [])]
    if lines := unmarked_long(reports):
        terminalreporter.section(f"took more than {LONG_S:.0f} s, not marked long")
        terminalreporter.write_line("\n".join(lines))


def pytest_unconfigure() -> None:
    """Nor does a thread that never ends keep the process."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """J-7: whatever a test starts in this process connects to loopback only."""
    global _guarding
    _guarding = True
    yield
    _guarding = False


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests leave in the temporary folder, and processes that they kill, goes with pytest's own folders."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)  # which is found anew
        yield folder


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """An engine that a test starts in a process of its own is forked, and need not import torch. What it is forked from
    ends with the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.base.child.start", start_engine)
        yield
    close_stock()


@pytest.fixture(scope="module", autouse=True)
def freed_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the collector is on after each module, and free memory.

    An engine has glibc keep what is freed, for the whole process and for each thread that frees, which one process
    per engine is none the worse for; tests have hundreds in one, and many threads. While an engine starts, its
    collector is off. A test that left it off would keep all cycles of later tests. Gates, which are the files beside
    this one, run without the collector: it takes three quarters of the time in which the package is parsed. Later tests
    would collect the trees that gates keep."""
    is_gate = request.path.parent == Path(__file__).parent
    if is_gate:
        gc.disable()
    else:
        for kept in SYNTAX_TREES:
            kept.cache_clear()
    yield
    assert is_gate or gc.isenabled(), "a test of this module has left the collector off"
    if is_gate:
        for known in vars(request.module).values():
            if isinstance(known, functools._lru_cache_wrapper) and known not in SYNTAX_TREES:
                known.cache_clear()
    gc.enable()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def decides_for_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor by which defaults are decided has AVX2 and no more, whatever this machine has: numbers that a test
    expects are then the same everywhere. A test of another processor hands that over."""
    (avx2,) = (variant for variant in VARIANTS if variant.name == "avx2")
    monkeypatch.setattr("forebay.base.cpu._cpu", lambda simulated: Cpu(flags=avx2.needs, simulated=avx2.name))


@pytest.fixture(scope="session")
def patience() -> Iterator[None]:
    """What the server gives up by the clock, however slow the machine is: it waits as long as the tests do. It does not
    wait for handshakes at its end: clients of tests have connected by then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.http.door.HANDSHAKE_S", 0.0)
        patch.setattr("forebay.http.workers.TIMEOUT_S", HANGS_S)
        patch.setattr("forebay.server.admin.state.STATE_TIMEOUT_S", HANGS_S)
        patch.setattr("forebay.text.tokenizer.MAX_PLACES_S", HANGS_S)
        patch.setattr("forebay.server.api.core.dialect.KEEP_ALIVE_S", HANGS_S)
        yield


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The default model, as `make install` puts it into the cache."""
    try:
        return find_model(None)
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of a Chromium."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip(f"no browser here (looked for {', '.join(BROWSERS)}): apt-get install chromium")
