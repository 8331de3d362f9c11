"""Compile the C++ kernels for this machine, once, into the user's cache.

The library's name holds a hash of the sources, the flags and the compiler. A change of any of them compiles anew, and
nothing is ever overwritten but by equal content. Objects are kept likewise, each by a hash of its inputs: a change
compiles only the files that it affects. Each compilation drops libraries that have been unused for long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forebay.base.errors import ConfigError
from forebay.base.leash import Leash
from forebay.base.log import event, get_logger
from forebay.base.paths import cache_folder
from forebay.base.toolchain import HERE, compilers, find_compiler
from forebay.base.trust import closed_folder
from forebay.base.variants import PREBUILT, Variant
from forebay.ops import compiled

SOURCES = Path(__file__).parent / "cpu"
CACHE = cache_folder("ops")
DAY_S = 24 * 3600.0
KEEP_OBJECTS_S = 7 * DAY_S  # since a library was last made of them
KEEP_LIBRARIES_S = 30 * DAY_S  # since one was last asked for
MANY_LIBRARIES = 16  # of a megabyte each; more are kept for a day
# The newest versions of libraries that a wheel for manylinux_2_28 may need (PEP 600); setup.py names that platform.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)

_log = get_logger("ops")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def library(variant: Variant) -> Path:
    """The compiled kernels of `variant`, compiling them if the cache has none; once compiled they need no compiler.

    Safe in several processes at once: each compiles for itself and the last rename wins, with equal content.
    Raises BuildError if there is neither a compiled library nor a working compiler.
    """
    stem = f"{variant.name}-{_fingerprint(variant)}"
    if brought := sorted(PREBUILT.glob(f"{stem}-*.so"), key=lambda path: path.stat().st_mtime):
        return _used(brought[-1])
    compiler = find_compiler(variant.machine)
    if compiler is not None:
        return _built(f"{stem}-{_version(compiler)}", variant, compiler)
    if found := compiled.find(CACHE, stem, ".so"):
        return _used(found)
    raise BuildError(_no_compiler(variant))


def prebuild(variant: Variant, folder: Path) -> Path:
    """Compile `variant` into `folder`, for a wheel; this machine need not be able to run it. Raises BuildError, also if
    the result needs newer libraries than a wheel may."""
    compiler = find_compiler(variant.machine)
    if compiler is None:
        raise BuildError(_no_compiler(variant))
    folder.mkdir(exist_ok=True)
    built = _built(f"{variant.name}-{_fingerprint(variant)}-{_version(compiler)}", variant, compiler)
    if newer := too_new_for_wheels(built):
        allowed = ", ".join(f"{name}_{'.'.join(map(str, version))}" for name, version in NEWEST.items())
        raise BuildError(
            f"{compiler} makes kernels that need {', '.join(newer)}; a wheel may need {allowed}, not newer: "
            "compile with an older g++"
        )
    return Path(shutil.copy(built, folder))


def too_new_for_wheels(library: Path) -> list[str]:
    """The versions of other libraries that a library needs beyond `NEWEST`."""
    needed = set(re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)(?=\0)", library.read_bytes()))
    versions = [(name.decode(), version.decode()) for name, version in sorted(needed)]
    return [f"{name}_{version}" for name, version in versions if _parts(version) > NEWEST[name]]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _no_compiler(variant: Variant) -> str:
    names = compilers(variant.machine)
    cross = f"Debian's g++-{variant.machine.replace('_', '-')}-linux-gnu"
    wanted = "g++ 11 or later" if variant.machine == HERE else cross
    return f"no C++ compiler found (looked for {', '.join(names)}): install {wanted}"


def _built(stem: str, variant: Variant, compiler: str) -> Path:
    if found := compiled.find(CACHE, stem, ".so"):
        return _used(found)
    try:
        for folder in (CACHE, CACHE / "objects"):
            closed_folder(folder)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".build-") as scratch:
            library = compiled.keep(_compile(variant, compiler, Path(scratch)), CACHE, stem)
        _drop_old()
    except ConfigError as error:
        raise BuildError(error.message) from error
    except OSError as error:
        raise BuildError(f"cannot write the compiled kernels under {CACHE}: {error}") from error
    _log.info(event("compiled_ops", variant=variant.name, path=library))
    return library


def _sources() -> list[Path]:
    """Return the source files, largest first, since these take long to compile: no thread is then left with it at the
    end."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path.name))


def _fingerprint(variant: Variant) -> str:
    """Return the digest of all that a library is made of, but for the compiler."""
    return _digest(variant, tuple(sorted((path, *_changed(path)) for path in SOURCES.iterdir())))


def _changed(path: Path | str) -> tuple[int, int]:
    """Return the time of modification and the size of a file."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=64)
def _digest(variant: Variant, files: tuple[tuple[Path, int, int], ...]) -> str:
    """Compute the fingerprint, once in a process unless one of `files` changes: that takes 30 ms."""
    whole = "".join(_object_key(source, variant) for source in sorted(_sources()))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _object_key(source: Path, variant: Variant, version: str = "") -> str:
    """Return the digest of a source, the headers of ours that it includes, and its flags and target."""
    text = _text(source)
    digest = hashlib.sha256(repr((_FLAGS, variant.flags_for(text), version)).encode())
    digest.update(text.encode())
    return digest.hexdigest()[:24]


def _text(source: Path) -> str:
    """The source and the headers of ours that it includes."""
    texts, found = [], [source]
    for path in found:
        texts.append(path.read_text())
        included = [source.parent / name for name in _INCLUDE.findall(texts[-1])]
        found += [path for path in dict.fromkeys(included) if path not in found]
    return "".join(texts)


def _version(compiler: str) -> str:
    return _said(compiler, *_changed(compiler))


@functools.cache
def _said(compiler: str, modified_ns: int, size: int) -> str:
    """Return the digest of what the compiler says about its version."""
    said = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(said).hexdigest()[:8]


def _compile(variant: Variant, compiler: str, scratch: Path) -> Path:
    """The linked library, in `scratch`."""
    version, objects = _version(compiler), CACHE / "objects"
    stems = {source: f"{source.stem}-{_object_key(source, variant, version)}" for source in _sources()}
    kept = {source: path for source, stem in stems.items() if (path := compiled.find(objects, stem, ".o"))}
    missing = [source for source in stems if source not in kept]
    done = itertools.count(1)
    started = time.perf_counter()

    def compile_one(source: Path) -> None:
        made = scratch / f"{source.name}.o"
        _run(leash, [compiler, *_FLAGS, *variant.flags_for(_text(source)), "-c", str(source), "-o", str(made)])
        kept[source] = compiled.keep(made, objects, stems[source])
        progress = f"{next(done)} of {len(missing)}"
        _log.info(event("compiled", file=source.name, done=progress, seconds=time.perf_counter() - started))

    # The leash within: after an error nobody waits for the compilers that still run.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor, Leash() as leash:
        _log.info(event("compiling_ops", variant=variant.name, compiler=compiler, files=len(missing), note="once"))
        list(executor.map(compile_one, missing))
        linked = scratch / "ops.so"
        objects_of = [str(kept[source]) for source in sorted(kept)]
        _run(leash, [compiler, *_FLAGS, *variant.flags, "-shared", *objects_of, "-o", str(linked)])
    for path in kept.values():
        path.touch()
    return linked


def _used(library: Path) -> Path:
    with contextlib.suppress(OSError):  # where it is another's, it is for them to drop
        library.touch()
    return library


def _drop_old() -> None:
    """Safe beside other processes: a process that is about to open a library has touched it, and one that has it open
    keeps it."""
    for age_s, path in _ages(CACHE / "objects", "*.o"):
        if age_s > KEEP_OBJECTS_S:
            path.unlink(missing_ok=True)
    for place, (age_s, path) in enumerate(_ages(CACHE, "*.so")):
        if age_s > (KEEP_LIBRARIES_S if place < MANY_LIBRARIES else DAY_S):
            path.unlink(missing_ok=True)
    for age_s, path in _ages(CACHE, ".build-*"):  # of who was killed
        if age_s > DAY_S:
            shutil.rmtree(path, ignore_errors=True)


def _ages(folder: Path, pattern: str) -> list[tuple[float, Path]]:
    """Seconds since each was last used, the last used first."""
    ages = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            ages.append((time.time() - path.stat().st_mtime, path))
    return sorted(ages)


def _run(leash: Leash, command: list[str]) -> None:
    done = leash.run(command)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}")
