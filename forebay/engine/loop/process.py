"""The engine process: `python -m forebay.engine.loop.process FD PARENT`, with FD our end of the channel (see `spawn`).

Its configuration is the first frame; its first answer is `Ready`, or `Dead` with the root cause. It lives as long as
its parent: signals that end a terminal's or a service's processes are the parent's to act on, and the parent's end is
ours, whatever we are in the middle of.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from forebay.base import fault
from forebay.base.clock import RunClock
from forebay.base.errors import ConfigError, EngineError, ForebayError, ModelError
from forebay.base.exit_codes import EXIT_FAILED, EXIT_REFUSED
from forebay.base.log import event, get_logger, setup_logging
from forebay.base.record_buffer import RecordBuffer
from forebay.base.signals import ENDING
from forebay.config.engine_config import EngineConfig
from forebay.engine.channel import Channel, ChannelClosed, ChannelError
from forebay.engine.frames import Configure, Dead, Ready, Shutdown, ToEngine
from forebay.engine.loop.core import EngineCore, close
from forebay.engine.loop.loop import EngineLoop
from forebay.engine.recorder import recorder
from forebay.requests.updates import Failure

Build = Callable[[EngineConfig, RunClock], tuple[EngineCore, Ready]]

PEER_GONE_GRACE_S: Final = 0.5  # for the loop to end by itself, which takes it no longer than a step
LAST_WORDS_S: Final = 1.0

_PR_SET_PDEATHSIG: Final = 1

log = get_logger("engine")


def our_end(words: Sequence[str]) -> socket.socket:
    """The end of the channel that `spawn` names. From here on the kernel ends us with our parent, if it named that: at
    once, where importing torch or loading weights would keep the watch on the channel waiting."""
    fd, *_, parent_pid = map(int, words)
    if parent_pid:
        end_with_parent(parent_pid)
    return socket.socket(fileno=fd)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process with its parent; end it now if that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_FAILED)


def our_buffer(words: Sequence[str]) -> RecordBuffer | None:
    """The memory for the flight recorder that `spawn` names, once it has its size; None if there is none."""
    _, memory, _ = map(int, words)
    return RecordBuffer.existing(memory) if memory >= 0 else None


def serve(
    sock: socket.socket,
    build: Build,
    *,
    ahead: Callable[[], None] = lambda: None,
    buffer: Callable[[], RecordBuffer | None] = lambda: None,
) -> int:
    """Be the engine at this end of `sock`; returns the process's exit code. `ahead` does the work that needs no
    configuration. `buffer` returns the memory of the flight recorder, once the configuration has come."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    _exit_with_peer(sock)
    channel: Channel[ToEngine] = Channel(sock, ToEngine)
    code = 0
    try:
        ahead()
        _run(channel, build, buffer)
    except ChannelClosed:
        pass
    except Exception as error:
        # What the user can mend is told once, by the parent, in words; the rest needs its traceback.
        refused = isinstance(error, ConfigError | ModelError)
        if not refused:
            log.critical(event("engine_died"), exc_info=error)
        code = EXIT_REFUSED if refused else EXIT_FAILED
        if not isinstance(error, ForebayError):
            error = EngineError(f"{type(error).__name__}: {error}", code="engine_dead")
        try:
            channel.send(Dead(failure=Failure.of(error)))
        except ChannelError as unheard:
            log.warning(event("last_words_unheard", reason=unheard.message))
    channel.close(linger_s=LAST_WORDS_S)
    return code


def _run(channel: Channel[ToEngine], build: Build, buffer: Callable[[], RecordBuffer | None]) -> None:
    frames: list[ToEngine] = []
    while not frames:
        frames = channel.receive(None)
    configure = frames[0]
    if not isinstance(configure, Configure):
        raise ChannelError(f"the first frame is {type(configure).__name__} and not Configure")
    fault.arm_from_environment()
    config = configure.config
    setup_logging(config.log_level, process=config.disaggregation.named("engine"), format=config.log_format)
    if any(isinstance(frame, Shutdown) for frame in frames):
        return
    clock = RunClock()
    core, ready = build(configure.config, clock)
    if (memory := buffer()) is not None:
        recorder.start(core.scheduler, memory)
    # What is alive now stays: the collector need not walk it in the middle of a step.
    gc.freeze()
    gc.enable()
    channel.send(ready)
    loop = EngineLoop(core, channel, clock=clock, sleep_idle_s=configure.config.sleep_idle_seconds)
    loop.start_beating(clock)
    channel.read_ahead()
    try:
        loop.run(frames[1:])
    finally:
        close(core)


def _exit_with_peer(sock: socket.socket) -> None:
    """From a thread of its own, so that neither a long step nor loading weights delays it by more than the grace."""

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # a hang-up is reported unasked
        poll.poll()
        time.sleep(PEER_GONE_GRACE_S)
        os._exit(EXIT_FAILED)

    # A copy of our own: the number stays ours when the channel closes its socket and something else takes that one.
    fd = os.dup(sock.fileno())
    threading.Thread(target=watch, name="peer-watch", daemon=True).start()


def main() -> NoReturn:
    """Run the engine process until the server closes the channel, then end it with an exit status. Imports torch while
    it watches the channel."""
    gc.disable()  # until all is loaded: nearly nothing of that is garbage

    # Here and not above: whoever dies while torch is being imported must find the watch already running.
    def ahead() -> None:
        importlib.import_module("forebay.engine.loop.build")

    def build(config: EngineConfig, clock: RunClock) -> tuple[EngineCore, Ready]:
        from forebay.engine.loop.build import build_engine

        if fault.planted():
            from forebay.engine.loop.planted import plant_armed

            plant_armed()
        return build_engine(config, clock)

    words = sys.argv[1:]
    code = serve(our_end(words), build, ahead=ahead, buffer=lambda: our_buffer(words))
    sys.stderr.flush()
    os._exit(code)  # tearing torch down takes time and can only go wrong


if __name__ == "__main__":
    main()
