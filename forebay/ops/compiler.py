"""Compile the C++ kernels for this machine, once, into the user's cache.

The library's name holds a hash of the sources, the flags and the compiler, so a change of any of them compiles anew and
nothing is ever overwritten.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forebay.base.leash import Leash
from forebay.base.log import event, get_logger
from forebay.base.paths import cache_folder
from forebay.base.toolchain import COMPILERS, find_compiler

SOURCES = Path(__file__).parent / "cpu"
CACHE = cache_folder("ops")
PREBUILT = Path(__file__).parent / "prebuilt"  # in a wheel: whoever installs that needs no compiler

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra")
_COMMON = (
    "pool.cpp",
    "copies.cpp",
    "linear_pack.cpp",
    "linear_f32.cpp",
    "linear_q_pack.cpp",
    "rowwise.cpp",
    "activations.cpp",
    "elementwise.cpp",
    "routing.cpp",
    "experts.cpp",
    "sampling.cpp",
    "kv.cpp",
    "attention.cpp",
    "attention_plan.cpp",
    "conv.cpp",
    "mamba.cpp",
    "delta.cpp",
)
_AVX512 = ("-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
_AVX512_NEEDS = frozenset({"f16c", "avx512_bf16", "avx512bw", "avx512vl", "avx512dq"})

_log = get_logger("ops")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One instruction set: the CPU flags it needs (as /proc/cpuinfo spells them) and how it is compiled."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    sources: tuple[str, ...]


VARIANTS = (  # best first
    Variant(
        name="amx",
        needs=_AVX512_NEEDS | {"amx_tile", "amx_bf16"},
        flags=(*_AVX512, "-DFOREBAY_AMX"),
        sources=(*_COMMON, "linear_amx.cpp", "attention_amx.cpp"),
    ),
    Variant(
        name="avx512",
        needs=_AVX512_NEEDS,
        flags=_AVX512,
        sources=(*_COMMON, "linear_bf16.cpp"),
    ),
    Variant(
        name="avx2",
        needs=frozenset({"avx2", "fma", "f16c"}),
        flags=("-mavx2", "-mfma", "-mf16c"),
        sources=(*_COMMON, "linear_bf16.cpp"),
    ),
)


def usable_variants() -> tuple[Variant, ...]:
    """The variants this CPU can run, best first; none off Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    flags = _cpu_flags()
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def library(variant: Variant) -> Path:
    """The compiled kernels of `variant`, compiling them if the cache has none; once compiled they need no compiler.

    Safe in several processes at once: each compiles for itself and the last rename wins, with equal content.
    Raises BuildError if there is neither a compiled library nor a working compiler.
    """
    flags = (*_FLAGS, *variant.flags)
    name = f"{variant.name}-{_fingerprint(flags, variant.sources)}"
    compiler = find_compiler()
    for folder in (PREBUILT,) if compiler else (PREBUILT, CACHE):
        compiled = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime)
        if compiled:
            return compiled[-1]
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}): install g++ 11 or later")
    return _built(CACHE / f"{name}-{_version(compiler)}.so", variant, compiler, flags)


def prebuild(variant: Variant, folder: Path) -> Path:
    """Compile `variant` into `folder`, for a wheel; this machine need not be able to run it. Raises BuildError."""
    flags = (*_FLAGS, *variant.flags)
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    name = f"{variant.name}-{_fingerprint(flags, variant.sources)}-{_version(compiler)}.so"
    return _built(folder / name, variant, compiler, flags)


def _built(target: Path, variant: Variant, compiler: str, flags: tuple[str, ...]) -> Path:
    folder = target.parent
    if target.exists():
        return target
    started = time.perf_counter()
    _log.info(event("compiling_ops", variant=variant.name, compiler=compiler, note="once, a few seconds"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            built = _compile(compiler, flags, variant.sources, Path(scratch))
            os.replace(built, target)
    except OSError as error:
        raise BuildError(f"cannot write the compiled kernels under {folder}: {error}") from error
    _log.info(event("compiled_ops", variant=variant.name, seconds=time.perf_counter() - started, path=target))
    return target


def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _fingerprint(flags: tuple[str, ...], sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, sources)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(said).hexdigest()[:8]


def _compile(compiler: str, flags: tuple[str, ...], sources: tuple[str, ...], folder: Path) -> Path:
    objects = [folder / f"{source}.o" for source in sources]
    commands = [
        [compiler, *flags, "-c", str(SOURCES / source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    linked = folder / "ops.so"
    # The leash within: after an error nobody waits for the compilers that still run.
    with ThreadPoolExecutor(os.cpu_count()) as executor, Leash() as leash:
        list(executor.map(partial(_run, leash), commands))
        _run(leash, [compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
    return linked


def _run(leash: Leash, command: list[str]) -> None:
    done = leash.run(command)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
