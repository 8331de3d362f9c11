"""Kernels of another processor, run by an emulator on the memory of this process.

`EmulatedKernels` stands for `Kernels`, so that ops and their tests need not know. The program behind it is driver.cpp.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from forebay.base.toolchain import find_compiler
from forebay.base.topology import Topology
from forebay.base.variants import Variant
from forebay.ops.compiler import CACHE
from forebay.ops.native import ops as native
from forebay.ops.native.experts import NativeExpertOps, NativeLayers
from forebay.ops.native.kernels import RESULTS, SIGNATURES, Kernels
from forebay.ops.native.ops import NativeOps

MACHINE: Final = "aarch64"
EMULATOR: Final = "qemu-aarch64-static"
LIBRARIES: Final = "/usr/aarch64-linux-gnu"  # of the cross compiler
SOURCE: Final = Path(__file__).with_name("driver.cpp")
# As in driver.cpp.
SMALL, LOW, HIGH = 1 << 44, 0x100000000000, 0x300000000000
PAGE, PAGES = 4096, 16
FIND, CALL = 1, 2
FOUND, FETCH, CHANGED, DONE = 1, 2, 3, 4


def why_not() -> str:
    """What is missing to emulate; empty if nothing is."""
    lacking = [] if find_compiler(MACHINE) else ["g++-aarch64-linux-gnu"]
    lacking += [] if shutil.which(EMULATOR) else ["qemu-user-static"]
    return f"apt-get install {' '.join(lacking)}" if lacking else ""


def compiled(source: Path, flags: tuple[str, ...]) -> Path:
    """A program for the machine, compiled anew in the folder of the compiled kernels."""
    compiler = find_compiler(MACHINE)
    assert compiler is not None
    CACHE.mkdir(parents=True, exist_ok=True)
    target = CACHE / f"{source.stem}-{os.getpid()}"
    subprocess.run([compiler, "-std=c++20", *flags, str(source), "-o", str(target)], check=True)
    return target


def emulated(program: Path, *arguments: str) -> list[str]:
    """The command that runs a program for the machine."""
    return [EMULATOR, "-L", LIBRARIES, str(program), *arguments]


def there(address: int) -> int:
    """Where an address of this process is in the driver."""
    return address + LOW if address < SMALL else address - HIGH


class Driver:
    """A running driver.cpp."""

    def __init__(self, path: Path) -> None:
        program = compiled(SOURCE, ("-O1",))
        self._process = subprocess.Popen(
            emulated(program, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        self.find("fb_cpu_init")  # it has been loaded
        program.unlink()

    def find(self, name: str) -> int:
        """The address of a function."""
        self._send(struct.pack("=2Q", FIND, len(name)) + name.encode())
        kind, found = self._words(2)
        assert (kind, found != 0) == (FOUND, True), name
        return found

    def call(self, address: int, ints: list[int], floats: list[float]) -> int:
        """The result of a function, which reads and writes the memory of this process."""
        words = [word & (1 << 64) - 1 for word in ints]
        self._send(
            struct.pack(f"=3Q{len(words)}Q", CALL, address, len(words), *words)
            + struct.pack(f"=Q{len(floats)}f", len(floats), *floats)
        )
        while True:
            kind, word = self._words(2)
            if kind == DONE:
                return word
            if kind == FETCH:
                self._send_chunk(word)
            else:
                assert kind == CHANGED, kind
                (length,) = self._words(1)
                os.pwrite(self._memory, self._read(length), word)

    def _send_chunk(self, address: int) -> None:
        pages, there = [], 0
        for i in range(PAGES):
            try:
                page = os.pread(self._memory, PAGE, address + i * PAGE)
            except OSError:
                page = b""
            there |= (len(page) == PAGE) << i
            pages.append(page.ljust(PAGE, b"\0"))
        self._send(struct.pack("=Q", there) + b"".join(pages))

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        left = memoryview(data)
        while left:
            left = left[self._process.stdin.write(left) :]

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        parts = []
        while size:
            part = self._process.stdout.read(size)
            assert part, f"the driver ended with {self._process.wait()}"
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _words(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}Q", self._read(8 * count))


class EmulatedKernels(Kernels):
    """Kernels for another processor."""

    def __init__(self, path: Path, variant: str, num_threads: int, topology: Topology | None = None) -> None:
        self._driver = Driver(path)
        self.called: set[str] = set()  # patterns of names
        self._objects: set[int] = set()  # made by the library: their addresses are the driver's
        self.num_nodes = 1
        self.pool = self.create("fb_pool", self, num_threads, 0, 0, 0)

    def create(self, thing: str, owner: object, *args: int) -> int:
        created = super().create(thing, owner, *args)
        self._objects.add(created)
        return created

    def bind(self, name: str, pattern: str | None = None) -> Callable[..., Any]:
        pattern = pattern or name
        function, takes, returns = self._driver.find(name), SIGNATURES[pattern], pattern in RESULTS

        def run(*args: Any) -> int | None:
            self.called.add(pattern)
            ints, floats = [], []
            for kind, value in zip(takes, args, strict=True):
                if kind is ctypes.c_float:
                    floats.append(value)
                elif kind is ctypes.c_void_p and value and value not in self._objects:
                    ints.append(there(value))
                else:
                    ints.append(int(value or 0))
            result = self._driver.call(function, ints, floats)
            return ctypes.c_long(result).value if returns else None

        return run

    def address(self, name: str) -> int:
        return self._driver.find(name)


class EmulatedOps(NativeOps):
    """The native ops, with kernels for another processor."""

    def __init__(self, path: Path, variant: str, num_threads: int, activation_bits: int = 16) -> None:
        with patch.object(native, "Kernels", EmulatedKernels), patch.object(native, "NativeExpertOps", EmulatedExperts):
            super().__init__(path, variant, num_threads, activation_bits)


class EmulatedExperts(NativeExpertOps):
    """Ops for experts, whose tables have addresses of the driver's."""

    def _layers(self, weights: Any) -> NativeLayers:
        layers = super()._layers(weights)
        for table in layers.tables.values():
            for column in (1, 2):  # addresses of weights and biases
                table[:, column] = torch.tensor([there(address) for address in table[:, column].tolist()])
        return layers


def emulated_variant(variant: Variant) -> Variant:
    """The variant, compiled with few optimizations: this takes half the time, and the emulator is slow with all."""
    return replace(variant, flags=(*variant.flags, "-O1"))
