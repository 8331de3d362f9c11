"""The two libraries of one-sided writes, in one process: where one is not installed, its transport runs over these.

Each holds to what the transports need of the real one: nothing works before it is started, only registered memory is
read and written, a peer is reached by what it published, writes to a peer that is gone fail, and a write ends some time
after it was begun. The tests of transfers pass over the real ones, too.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

_PENDING_LOOKS = 3  # a write is asked for so often before it ends


class Memory:
    """The registered memory of one end."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int]] = []

    def register(self, begin: int, num_bytes: int) -> None:
        assert 0 < num_bytes < begin, f"{num_bytes} bytes at {begin}: the address comes first"
        self._regions.append((begin, num_bytes))

    def has(self, begin: int, num_bytes: int) -> bool:
        return any(start <= begin and begin + num_bytes <= start + length for start, length in self._regions)


class Write:
    """Bytes on their way: `advance` returns True once they are there."""

    def __init__(self, stretches: Iterable[tuple[int, int, int]]) -> None:
        self._stretches = list(stretches)
        self._looks = 0

    def advance(self) -> bool:
        self._looks += 1
        if self._looks == _PENDING_LOOKS:
            for ours, theirs, num_bytes in self._stretches:
                ctypes.memmove(theirs, ours, num_bytes)
        return self._looks >= _PENDING_LOOKS


# -- Mooncake ---------------------------------------------------------------------------------------------------------


class TransferEngine:
    """Mooncake's engine, which returns codes."""

    started: WeakValueDictionary[str, TransferEngine] = WeakValueDictionary()
    ports = itertools.count(20_000)

    def __init__(self) -> None:
        self.memory, self._port = Memory(), 0
        self._writes: list[Write] = []

    def initialize(self, name: str, metadata: str, protocol: str, device: str) -> int:
        if metadata != "P2PHANDSHAKE" or protocol not in ("tcp", "rdma") or device or not name:
            return -1
        self._port = next(self.ports)
        self.started[f"{name}:{self._port}"] = self
        return 0

    def batch_register_memory(self, begins: list[int], lengths: list[int]) -> int:
        if not self._port:
            return -1
        for begin, num_bytes in zip(begins, lengths, strict=True):
            self.memory.register(begin, num_bytes)
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def send_probe(self, peer: str) -> int:
        return 0 if peer in self.started else -1

    def transfer_submit_write(self, peer: str, ours: int, theirs: int, num_bytes: int) -> int:
        there = self.started.get(peer)
        if there is None or not (self.memory.has(ours, num_bytes) and there.memory.has(theirs, num_bytes)):
            return -1
        self._writes.append(Write([(ours, theirs, num_bytes)]))
        return len(self._writes) - 1

    def transfer_check_status(self, number: int) -> int:
        return 1 if self._writes[number].advance() else 0


# -- NIXL -------------------------------------------------------------------------------------------------------------

DRAM_SEG, NIXL_WRITE, NIXL_THREAD_SYNC_STRICT = "DRAM", "WRITE", "STRICT"
NIXL_SUCCESS, NIXL_IN_PROG = 0, 1


class nixlNotFoundError(Exception):
    pass


class nixlInvalidParamError(Exception):
    pass


class nixlAgentConfig:
    useProgThread, pthrDelay, syncMode = False, 0, ""


class nixlRegDList:
    def __init__(self, segment: str, regions: Sequence[tuple[int, int, int, str]]) -> None:
        assert segment == DRAM_SEG
        self.regions = regions


class nixlXferDList:
    def __init__(self, segment: str, stretches: npt.NDArray[np.uint64]) -> None:
        assert segment == DRAM_SEG
        assert stretches.dtype == np.uint64
        assert not stretches[:, 2].any(), "there is one device, 0"
        self.stretches = [(int(begin), int(num_bytes)) for begin, num_bytes, _ in stretches]


class nixlAgent:
    """NIXL's agent, which raises."""

    started: WeakValueDictionary[str, nixlAgent] = WeakValueDictionary()

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        assert config.useProgThread
        assert 0 < config.pthrDelay < 1_000_000
        assert config.syncMode == NIXL_THREAD_SYNC_STRICT
        self.name, self.memory, self._backends = name, Memory(), list[str]()
        self._requests: dict[int, Write] = {}
        self._posted: set[int] = set()
        self._numbers = itertools.count(1)
        self.started[name] = self

    def createBackend(self, name: str, options: dict[str, str]) -> None:
        if name != "UCX" or options:
            raise nixlNotFoundError(name)
        self._backends.append(name)

    def registerMem(self, regions: nixlRegDList) -> None:
        if not self._backends:
            raise nixlNotFoundError("no backend")
        for begin, num_bytes, device, metadata in regions.regions:
            assert (device, metadata) == (0, "")
            self.memory.register(begin, num_bytes)

    def getLocalMD(self) -> bytes:
        return self.name.encode()

    def loadRemoteMD(self, end: bytes) -> bytes:
        if end.decode() not in self.started:
            raise nixlNotFoundError(end)
        return end

    def createXferReq(self, operation: str, ours: nixlXferDList, theirs: nixlXferDList, peer: str) -> int:
        assert operation == NIXL_WRITE
        there = self.started.get(peer)
        if there is None:
            raise nixlNotFoundError(peer)
        stretches: list[tuple[int, int, int]] = []
        for (here, num_bytes), (away, as_many) in zip(ours.stretches, theirs.stretches, strict=True):
            if num_bytes != as_many or not (self.memory.has(here, num_bytes) and there.memory.has(away, num_bytes)):
                raise nixlInvalidParamError(here, away, num_bytes)
            stretches.append((here, away, num_bytes))
        number = next(self._numbers)
        self._requests[number] = Write(stretches)
        return number

    def postXferReq(self, number: int) -> int:
        self._posted.add(number)
        return NIXL_IN_PROG

    def getXferStatus(self, number: int) -> int:
        if number not in self._posted:
            raise nixlInvalidParamError("not posted")
        return NIXL_SUCCESS if self._requests[number].advance() else NIXL_IN_PROG

    def releaseXferReq(self, number: int) -> None:
        del self._requests[number]


def install(module: str) -> None:
    """Let `import module` find this file's stand-in, until the process ends."""
    package, _, name = module.rpartition(".")
    fake = ModuleType(module)
    vars(fake).update({key: value for key, value in globals().items() if not key.startswith("_")})
    sys.modules[package] = sys.modules.get(package) or ModuleType(package)
    sys.modules[module] = fake
    setattr(sys.modules[package], name, fake)
