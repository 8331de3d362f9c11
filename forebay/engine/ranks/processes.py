"""The processes of ranks above 0, as rank 0 starts, watches and ends them. No torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from forebay.base import child
from forebay.base.errors import EngineError
from forebay.base.exit_codes import EXIT_FAILED
from forebay.base.log import event, get_logger
from forebay.config.engine_config import EngineConfig, RankOptions
from forebay.config.gpu import visible_gpu
from forebay.engine.ranks.activity import Activity
from forebay.engine.ranks.outcome import RankLost
from forebay.engine.ranks.ring import RING_BYTES, RingWriter
from forebay.requests.step_plan import CapturingRunner, Launched, StepPlan

ENTRY: Final = ("-P", "-m", "forebay.engine.loop.rank")
WATCH_S: Final = 0.25
END_S: Final = 5.0  # a rank ends after its step, or is killed
_LENGTH: Final = struct.Struct("<I")
_STDERR: Final = 2

log = get_logger("engine")


class ConfigureRank(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank's process. `processes` are those of all ranks, in their order."""

    config: EngineConfig
    rank: int
    processes: list[int]


def end_process(error: EngineError) -> NoReturn:
    """End this process, and with it all ranks: the kernel ends children with their parent."""
    log.critical(event("rank_lost", reason=error.message, effect="all ranks end"))
    os._exit(EXIT_FAILED)


class RankProcesses:
    """The processes of ranks 1 up to `size`, each with its pipes, memory for a ring that all ranks share, and the file
    `exchange`, which this object then owns. They end with this process, and it ends if one of them does, or stalls for
    longer than `config`'s stall timeout: it keeps a step for longer, or uses no CPU time for as long while it loads or
    changes its memory. `on_lost` ends it."""

    def __init__(
        self,
        config: EngineConfig,
        exchange: int,
        *,
        entry: Sequence[str] = ENTRY,
        on_lost: Callable[[EngineError], NoReturn] = end_process,
    ) -> None:
        self._on_lost, self._stall_s = on_lost, config.ranks.stall_timeout_s
        ring, self.exchange = os.memfd_create("forebay-log"), exchange
        os.ftruncate(ring, RING_BYTES)
        self.children: list[subprocess.Popen[bytes]] = []
        self._places: list[int] = []
        self._outcomes: list[int] = []
        for rank in range(1, config.ranks.size):
            (theirs, places), (outcomes, their_outcomes) = os.pipe(), os.pipe()
            numbers = theirs, their_outcomes, ring, self.exchange
            words = [*entry, *map(str, (*numbers, os.getpid()))]
            variables, label = child.environment() | own_variables(config.ranks, rank), f"rank {rank}"
            process = child.start(words, descriptors=numbers, stdout=_STDERR, variables=variables, label=label)
            self.children.append(process)
            os.close(theirs)
            os.close(their_outcomes)
            self._places.append(places)
            self._outcomes.append(outcomes)
        processes = [os.getpid(), *(each.pid for each in self.children)]
        for rank, places in enumerate(self._places, 1):
            send_configuration(places, ConfigureRank(config=config, rank=rank, processes=processes))
        self._memory = mmap.mmap(ring, RING_BYTES)
        os.close(ring)
        self.ring = RingWriter(self._memory, self._places, self._outcomes, on_lost=on_lost, ended=self._ended)
        self._closing, self._is_loaded = False, False
        self._activity = Activity(processes[1:])
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def descriptors(self) -> list[int]:
        """Return descriptors (pidfd) of the ranks' processes."""
        return [os.pidfd_open(each.pid) for each in self.children]

    def loaded(self) -> None:
        """Note that all ranks have loaded the model, after which they work at entries of the log alone."""
        self._is_loaded = True

    def close(self) -> None:
        """End the processes, and release what is shared with them. Idempotent; no step may be in flight."""
        if self._closing:
            return
        self._closing = True
        for places in self._places:
            os.close(places)  # for which a rank ends
        for each in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(END_S)
        child.end(self.children, grace_s=0.0)
        self._watcher.join()
        self._memory.close()
        for fd in (*self._outcomes, self.exchange):
            os.close(fd)

    def _ended(self, rank: int) -> RankLost:
        return RankLost(f"rank {rank} has ended: {_how(self.children[rank - 1])}")

    def _watch(self) -> None:
        poll = select.poll()
        for fd in self._outcomes:
            poll.register(fd, 0)  # a hang-up is reported unasked
        while True:
            ended = poll.poll(WATCH_S * 1e3)
            if self._closing:
                return
            for fd, _ in ended:
                self._on_lost(self._ended(self._outcomes.index(fd) + 1))
            if (seconds := self.ring.stalled_s()) > self._stall_s:
                self._on_lost(
                    RankLost(f"ranks keep a log entry for {seconds:.1f} s, --stall-timeout is {self._stall_s:g}")
                )
            working = self.ring.working() if self._is_loaded else range(1, len(self.children) + 1)
            for rank, seconds in self._activity.idle_s(working).items():
                if seconds > self._stall_s:
                    self._on_lost(self._stood_still(rank, seconds))

    def _stood_still(self, rank: int, seconds: float) -> RankLost:
        what = "changes its memory" if self._is_loaded else "loads the model"
        limit = f"--stall-timeout is {self._stall_s:g}"
        return RankLost(f"rank {rank} {what}, and has used no CPU time for {seconds:.1f} s, {limit}")


def own_variables(ranks: RankOptions, rank: int) -> dict[str, str]:
    """Return the variables of a rank's process beside those of all: of several GPUs it sees its own alone."""
    return {"CUDA_VISIBLE_DEVICES": visible_gpu(rank)} if ranks.own_gpus else {}


def _how(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended that has closed its pipes."""
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "it has closed its pipes, and runs"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def send_configuration(places: int, configuration: ConfigureRank) -> None:
    """Write the first message into a rank's pipe, which has room for it."""
    data = msgspec.msgpack.encode(configuration)
    os.write(places, _LENGTH.pack(len(data)) + data)


def read_configuration(places: int) -> ConfigureRank | None:
    """Read the first message; None if rank 0 has ended."""
    data = os.read(places, _LENGTH.size)
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(data)
    data = b""
    while len(data) < length:
        piece = os.read(places, length - len(data))
        if not piece:
            return None
        data += piece
    return msgspec.msgpack.decode(data, type=ConfigureRank)


class EndingRunner:
    """Rank 0's runner. A step that fails while ranks compute it leaves them in the middle of its exchanges, so that all
    ranks end."""

    def __init__(self, runner: CapturingRunner, on_lost: Callable[[EngineError], NoReturn]) -> None:
        self._runner, self._on_lost = runner, on_lost

    def launch(self, plan: StepPlan) -> Launched:
        """Start the step; end all ranks if it raises."""
        try:
            return self._runner.launch(plan)
        except Exception as error:
            self._on_lost(RankLost(f"rank 0: step {plan.step} failed with {type(error).__name__}: {error}"))

    def capture_next(self) -> bool:
        """Capture one more size; end all ranks if that raises."""
        try:
            return self._runner.capture_next()
        except Exception as error:
            self._on_lost(RankLost(f"rank 0: a capture failed with {type(error).__name__}: {error}"))
