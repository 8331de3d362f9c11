"""Servers and engines that are forked from a process which has imported everything, in the place of new interpreters.

A new interpreter needs a second of CPU to import a server, and two to import an engine. So each process of the suite
keeps one `Stock`, which imports them once, and forks it for each server that a test starts (`Tree`) and for each engine
of its own (`forked_engines` in `tests/conftest.py`). Such a server forks in turn for its engine, and a router for its
servers. Only start and exit differ: each is a process of its own, with its arguments, variables, descriptors and
signals. Tests of start and exit have new interpreters (`Tree(..., fresh=True)`).
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from forebay.base import child
from forebay.base.fault import FAULT_VARIABLES
from forebay.base.signals import ENDING

ROOT: Final = Path(__file__).parents[2]
ENGINE: Final = "forebay.engine.loop.process"
FAKE_ENGINE: Final = "tests.engine.fake_engine"
RANK: Final = "forebay.engine.loop.rank"
ENGINES: Final = (ENGINE, FAKE_ENGINE, RANK)
FORKED: Final = (ENGINE, "forebay.cli.member")  # by forked processes; others are interpreters
IMPORTED: Final = (
    *("forebay.cli.commands", "forebay.cli.serve", "forebay.cli.serving", "forebay.cli.local_fleet"),
    *("forebay.cli.member", "forebay.cli.startup_table", "forebay.server.serve", "forebay.cli.main"),
    *(*ENGINES, "forebay.engine.loop.build", "forebay.server.images.tiling", "forebay.text.tokenizer"),
)
_ROOM: Final = "-" * 4096  # an argument in whose place the arguments of a forked process are shown
_VARIABLES: Final = dict(os.environ)  # before any test has changed them
_START: Final = child.start
_MOST_FILES: Final = 32
_NUMBER: Final = struct.Struct("=q")
_STDERR: Final = 2


class Forked:
    """A process that the stock has forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, news: socket.socket) -> None:
        self._news = news  # its number, then its exit code
        self.returncode: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        number: int = _NUMBER.unpack(self._news.recv(_NUMBER.size))[0]
        return number

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._news, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("forebay serve", timeout or 0.0)
            self.returncode = self._read()
            self._news.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Stock:
    """The process that has imported everything. It ends with `close`, and with this process."""

    def __init__(self, begin: Callable[[socket.socket], subprocess.Popen[bytes]] | None = None) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = (begin or _new_interpreter)(theirs)

    def start(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        output: int,
        descriptors: Sequence[int] = (),
        own_session: bool = False,
    ) -> Forked:
        """Fork a process that is what an interpreter with these arguments would be. It inherits the `descriptors`, and
        writes to `output`."""
        about = {"arguments": list(arguments), "variables": dict(variables), "descriptors": list(descriptors)}
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps({**about, "own_session": own_session}).encode()
            socket.send_fds(self._sock, [message], [theirs.fileno(), output, *descriptors])
        return Forked(ours)

    def close(self) -> None:
        """End the process. Processes that it has forked go on."""
        self._sock.close()
        self._process.kill()  # it may still import
        self._process.wait()


def _new_interpreter(sock: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.forked", str(sock.fileno()), _ROOM],
        cwd=ROOT,
        env={**_VARIABLES, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[sock.fileno()],
        start_new_session=True,
    )


def this_process(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Fork this process, which has imported what an engine needs, to be the stock."""
    pid = os.fork()
    if pid == 0:
        _run_stock(sock, [ENGINE])
    return _Child(pid)


@cache
def stock() -> Stock:
    return Stock()


def close_stock() -> None:
    """End the stock, if this process has one. A later `stock()` is a new one."""
    if stock.cache_info().currsize:
        stock().close()
        stock.cache_clear()


def can_fork(variables: Mapping[str, str]) -> bool:
    """Return whether the stock could have imported the same with these variables."""
    return _fixed(variables) == _fixed(_VARIABLES)


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules read when they are imported, and keys. An engine reads its faults later."""
    read = ("FOREBAY_", "PYTHON", "OMP_", "ATEN_")
    return {key: value for key, value in variables.items() if key.startswith(read) and key not in FAULT_VARIABLES}


def start_engine(arguments: Sequence[str], *, descriptors: Sequence[int], **how: Any) -> Any:
    """Start what `forebay.base.child.start` does. The engine of a process of the suite is forked from its stock."""
    if not {*ENGINES} & {*arguments} or not can_fork(os.environ):
        return _START(arguments, descriptors=descriptors, **how)
    return fork_engine(stock(), arguments, descriptors=descriptors)


def fork_engine(stock: Stock, arguments: Sequence[str], *, descriptors: Sequence[int], **how: Any) -> Any:
    """Fork an engine from a stock."""
    return stock.start(arguments, child.environment(), output=_STDERR, descriptors=descriptors)


def _module(arguments: Sequence[str]) -> str:
    return arguments[arguments.index("-m") + 1]


def _run_stock(sock: socket.socket, modules: Sequence[str] = IMPORTED) -> NoReturn:
    """Import everything, then fork for each message."""
    # Libraries have threads that wait for work. They survive no fork, and start anew when there is some.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    for name in modules:
        importlib.import_module(name)
    while _readable(sock):
        message, files, *_ = socket.recv_fds(sock, 1 << 20, _MOST_FILES)
        if os.fork() == 0:
            _attend(files, **json.loads(message))
        for file in files:
            os.close(file)
    os._exit(0)


def _readable(sock: socket.socket) -> bool:
    """Wait for a message. Returns False if there will be none. Reaps attendants meanwhile, one behind."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    return bool(sock.recv(1, socket.MSG_PEEK))


def _attend(
    files: Sequence[int],
    arguments: list[str],
    variables: Mapping[str, str],
    descriptors: Sequence[int],
    own_session: bool,
) -> NoReturn:
    """Fork the process; send its number and, when it has ended, its exit code."""
    news, output, *given = files
    if pid := os.fork():
        for file in (output, *given):
            os.close(file)
        os.write(news, _NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(news, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    if own_session:
        os.setsid()
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    above = max((*files, *descriptors))
    for file, number in [
        (fcntl.fcntl(file, fcntl.F_DUPFD, above + 1), n) for file, n in zip(given, descriptors, strict=True)
    ]:
        os.dup2(file, number)
    if _module(arguments) in ENGINES:
        arguments[-1] = str(os.getppid())  # the process that it must not outlive
    _become(arguments, variables, descriptors)
    child.start = _start
    _run(arguments)


def _become(arguments: Sequence[str], variables: Mapping[str, str], keep: Sequence[int]) -> None:
    """Make this process what an interpreter with these arguments would be after its start."""
    last = _STDERR
    for fd in sorted({*keep, os.sysconf("SC_OPEN_MAX")}):
        os.closerange(last + 1, fd)
        last = fd
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *arguments[arguments.index("-m") + 2 :]]
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # A suite under nohup or in the background ignores the last two.
        if callable(signal.getsignal(number)) or number in (signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show(arguments)


def _show(arguments: Sequence[str]) -> None:
    """Write the arguments where the kernel reads /proc/PID/cmdline."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in (sys.executable, *arguments))
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


class _Child(subprocess.Popen[bytes]):
    """A forked child of this process."""

    def __init__(self, pid: int) -> None:
        self._forked = pid
        super().__init__(["forebay"])

    def _execute_child(self, *_: object, **__: object) -> None:
        self.pid, self._child_created = self._forked, True


def _start(
    arguments: Sequence[str],
    *,
    descriptors: Sequence[int],
    stdout: int | None = subprocess.DEVNULL,
    stderr: int | None = None,
    variables: Mapping[str, str] | None = None,
    own_session: bool = False,
    label: str = "child",
) -> subprocess.Popen[bytes]:
    """Fork, where `forebay.base.child.start` starts an interpreter for one of the modules `FORKED`."""
    if _module(arguments) not in FORKED:
        streams = {"stdout": stdout, "stderr": stderr}
        return _START(
            arguments, descriptors=descriptors, **streams, variables=variables, own_session=own_session, label=label
        )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, () if own_session else ENDING)
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd, given in enumerate((subprocess.DEVNULL, stdout, stderr)):
            if given is not None:
                os.dup2(null if given == subprocess.DEVNULL else given, fd)
        _become(arguments, child.environment() if variables is None else variables, descriptors)
        _run(arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return _Child(pid)


def _run(arguments: Sequence[str]) -> NoReturn:
    """Run the module and end the process, whose frames below this one are those of its parent."""
    code: Any = 1
    try:
        code = importlib.import_module(_module(arguments)).main()
    except SystemExit as done:
        code = done.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    _run_stock(socket.socket(fileno=int(sys.argv[1])))
