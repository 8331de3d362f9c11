"""Repositories of the Hugging Face hub: their lists of files, and files fetched into the cache that all tools share.

The hub's own library lists and streams; it is imported here alone. It keeps nothing of a download that was ended, and
trusts the headers of an answer. So files are fetched here: resumed, checked against the size and the hash that the list
announced, and linked into the library's layout. Every name and hash that becomes a path is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

import httpx2
from huggingface_hub import CachedFileInfo, HfApi, get_token, hf_hub_url, scan_cache_dir
from huggingface_hub import constants as hub_settings
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import CachedRepoInfo, DeleteCacheStrategy, HFCacheInfo, build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from forebay.base.errors import ConfigError, ModelError, brief
from forebay.base.package import __version__
from forebay.base.progress import Progress
from forebay.base.units import human_bytes
from forebay.formats.gguf_parts import part_paths
from forebay.formats.hub_names import BLOBS, COMMIT, REVISIONS, HubModel, hub_folder, repository_folder

hub_settings.HF_HUB_DISABLE_TELEMETRY = True  # which asks the hub what it should look for here, and tells it

_ENDPOINT: Final = "https://huggingface.co"
_LIBRARY: Final = "forebay"
_WORKERS: Final = 4  # files at a time
_CHUNK_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 32 << 30  # of one request: the library refuses 50 GB and more
_MAX_FILES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 50  # of one file
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_WITHIN: Final = re.compile(r"additional_chat_templates/[^/]+\.jinja|\d_\w+/config\.json")
_SMALL: Final = (".json", ".jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """`digest` is the sha256 (64 digits), or of a small file the hash of its git blob (40 digits)."""

    name: str
    num_bytes: int
    digest: str

    def __post_init__(self) -> None:
        path = PurePosixPath(str(self.name))
        is_plain = str(path) == self.name and self.name.isprintable() and not path.is_absolute()
        if not is_plain or ".." in path.parts or self.name == ".":
            raise ModelError(f"the hub announces a file {brief(self.name)}, which is not a path inside a folder")
        if (
            not _DIGEST.fullmatch(str(self.digest))
            or type(self.num_bytes) is not int
            or not 0 <= self.num_bytes <= _MAX_BYTES
        ):
            raise ModelError(
                f"the hub announces {self.name} with the hash {brief(self.digest)} and {brief(self.num_bytes)} bytes: "
                f"expected a git hash (40 hexadecimal digits) or a sha256 (64), and a size up to {_MAX_BYTES}"
            )

    @property
    def algorithm(self) -> str:
        return "sha256" if len(self.digest) == 64 else "git hash"

    def hash_of(self, chunks: Iterable[bytes]) -> str:
        """Return the hash of the content in the hub's algorithm: SHA-256, or git's blob SHA-1 for small files."""
        hasher = hashlib.sha256()
        if self.algorithm != "sha256":
            hasher = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)
        for chunk in chunks:
            hasher.update(chunk)
        return hasher.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model's at one commit, and its files by name."""

    model: HubModel
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def descriptions(self) -> list[str]:
        """The files beside weights that are read: configurations, also of the modules of an embedder, tokenizer,
        templates."""
        return [name for name in self.files if _WITHIN.fullmatch(name) or ("/" not in name and name.endswith(_SMALL))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """`HF_ENDPOINT`, with `HF_TOKEN` or the token of `hf auth login`, and the folder of the cache."""

    endpoint: str = field(default_factory=lambda: os.environ.get("HF_ENDPOINT", _ENDPOINT).rstrip("/"))
    token: str | None = field(default_factory=lambda: get_token())
    cache: Path = field(default_factory=hub_folder)

    def look(self, model: HubModel) -> Repository:
        """Ask the hub for the list of files. Raises ConfigError and ModelError that name the obstacle."""
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ConfigError(f"{model} is not in {self.cache}, and HF_HUB_OFFLINE is set: unset it to fetch the model")
        api = HfApi(endpoint=self.endpoint, token=self.token, library_name=_LIBRARY, library_version=__version__)
        with self._in_words(model):
            commit = api.model_info(model.repo, revision=model.revision).sha
            if commit is None or not COMMIT.fullmatch(commit):
                raise ModelError(f"{self.endpoint} gave {brief(commit)} as the commit of {model}: is it a hub?")
            tree = list(islice(api.list_repo_tree(model.repo, recursive=True, revision=commit), _MAX_FILES + 1))
            files = [_remote_file(entry) for entry in tree if isinstance(entry, RepoFile)]
        if len(tree) > _MAX_FILES:
            raise ModelError(f"{model.repo} has more than {_MAX_FILES} files; at most {_MAX_FILES} are listed")
        return Repository(model=model, commit=commit, files={file.name: file for file in files})

    def fetch(self, repository: Repository, names: Sequence[str], progress: Progress) -> Path:
        """Fetch these files into the cache, resuming an earlier call that was ended; return the snapshot's folder."""
        hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        files = [repository.files[name] for name in names]
        tally = _Tally(sum(file.num_bytes for file in files), progress)
        self._check_space(repository, files)
        with self._in_words(repository.model), ThreadPoolExecutor(_WORKERS) as pool:
            try:
                for done in [pool.submit(self._fetch, repository, file, tally) for file in files]:
                    done.result()
            except BaseException:  # Ctrl-C among them: the others must not go on for an hour
                tally.ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return self._folder(repository) / REVISIONS / repository.commit

    def begin(self, repository: Repository, name: str, num_bytes: int, target: Path) -> Path:
        """Fetch the beginning of a file, and make `target` a file of the same size that begins so and has holes."""
        file, tally = repository.files[name], _Tally(num_bytes, lambda done, total: None)
        blob = self._blob(repository, file)
        with self._in_words(repository.model):
            self._fetch_blob(repository, file, tally, upto=num_bytes)
        with (blob if blob.exists() else _partial(blob)).open("rb") as source, target.open("wb") as sink:
            sink.write(source.read(num_bytes))
            sink.truncate(file.num_bytes)
        return target

    def settle(self, repository: Repository) -> None:
        """Say that the commit is the revision's, once all that is wanted of it is there."""
        ref = self._folder(repository) / "refs" / repository.model.revision
        if repository.model.revision != repository.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            scratch = ref.with_name(f"{ref.name}.{os.getpid()}")
            scratch.write_text(repository.commit)
            scratch.replace(ref)

    def _folder(self, repository: Repository) -> Path:
        return repository_folder(repository.model.repo, self.cache)

    def _blob(self, repository: Repository, file: RemoteFile) -> Path:
        return self._folder(repository) / BLOBS / file.digest

    def _fetch(self, repository: Repository, file: RemoteFile, tally: _Tally) -> None:
        self._fetch_blob(repository, file, tally)
        link = self._folder(repository) / REVISIONS / repository.commit / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        scratch = link.with_name(f".{file.digest}.{os.getpid()}.{threading.get_ident()}")
        scratch.symlink_to(os.path.relpath(self._blob(repository, file), link.parent))
        scratch.replace(link)

    def _fetch_blob(self, repository: Repository, file: RemoteFile, tally: _Tally, upto: int | None = None) -> None:
        """All of it, or its first `upto` bytes at least."""
        blob, end = self._blob(repository, file), min(upto or file.num_bytes, file.num_bytes)
        blob.parent.mkdir(parents=True, exist_ok=True)
        if blob.exists():
            return tally.update(end)
        with _partial(blob).open("ab") as sink:
            fcntl.flock(sink, fcntl.LOCK_EX)  # another process may be about it
            if blob.exists():
                _partial(blob).unlink(missing_ok=True)
                return tally.update(end)
            have = sink.seek(0, os.SEEK_END)
            tally.update(min(have, end))
            while have < end:
                upto = min(end, have + _PIECE_BYTES)
                self._get(repository, file, sink, have, upto, tally)
                have = upto
            if end == file.num_bytes:
                _check(_partial(blob), file)
                _partial(blob).replace(blob)
        return None

    def _get(
        self, repository: Repository, file: RemoteFile, sink: BinaryIO, have: int, end: int, tally: _Tally
    ) -> None:
        url = hf_hub_url(repository.model.repo, file.name, revision=repository.commit, endpoint=self.endpoint)
        headers: dict[str, Any] = build_hf_headers(token=self.token, library_name=_LIBRARY, library_version=__version__)
        headers["Accept-Encoding"] = "identity"  # a download is resumed by the bytes of the file
        if end < file.num_bytes:
            headers["Range"] = f"bytes=0-{end - 1}"
        counted: Any = _Counted(tally, file, end - have)
        try:
            http_get(url, sink, resume_size=have, headers=headers, expected_size=end, _tqdm_bar=counted)
        except ModelError:
            sink.truncate(0)
            raise
        sink.flush()

    def _check_space(self, repository: Repository, files: Sequence[RemoteFile]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        there = self._folder(repository) / REVISIONS / repository.commit
        need = sum(file.num_bytes for file in files if not (there / file.name).exists())
        free = shutil.disk_usage(self.cache).free
        if need > free:
            raise ConfigError(
                f"{self.cache} has {human_bytes(free)} free and {repository.model} needs {human_bytes(need)}: remove "
                "models (`forebay models rm`), or set HF_HOME to a larger disk"
            )

    @contextlib.contextmanager
    def _in_words(self, model: HubModel) -> Iterator[None]:
        """Convert the library's exceptions to errors that name a remedy."""
        again = "what was fetched is kept, and the same command goes on from there"
        try:
            yield
        except GatedRepoError as error:
            token = "the token that is set may not see it" if self.token else "no token is set"
            raise ConfigError(
                f"{model.repo} is gated, and {token}: accept its terms at {self.endpoint}/{model.repo}, then log in "
                "with `hf auth login`, or set HF_TOKEN"
            ) from error
        except RepositoryNotFoundError as error:
            token = "the token that is set may not see it" if self.token else "it is private (log in, or set HF_TOKEN)"
            raise ModelError(
                f"{self.endpoint} has no model {model.repo}, or {token}; nor is there such a file or folder here"
            ) from error
        except RevisionNotFoundError as error:
            raise ModelError(
                f"{model.repo} has no revision {model.revision!r}: see {self.endpoint}/{model.repo}"
            ) from error
        except HfHubHTTPError as error:
            code = error.response.status_code
            refused = ": the token was refused, log in again or set HF_TOKEN" if code == 401 else f"; {again}"
            raise ConfigError(f"{self.endpoint} answered {code} about {model.repo}{refused}") from error
        except httpx2.HTTPError as error:
            raise ConfigError(
                f"{self.endpoint} cannot be reached ({type(error).__name__}: {error}): check the network, HTTPS_PROXY "
                f"and HF_ENDPOINT; {again}. No file or folder is called {model} here"
            ) from error
        except HFValidationError as error:
            raise ModelError(f"no repository can be called {model.repo}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"the answer of {self.endpoint} about {model.repo} is not that of a hub ({what})"
            ) from error
        except OSError as error:
            raise ConfigError(f"{model} cannot be fetched to {self.cache}: {error}; {again}") from error


class _Tally:
    """Bytes of several files together. A download that counts after `ended` is ended too."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.ended = threading.Event()
        self._total, self._progress = total, progress
        self._done, self._lock = 0, threading.Lock()

    def update(self, count: float | None = 1) -> None:
        if self.ended.is_set():
            raise OSError("the download was ended")
        with self._lock:
            self._done += int(count or 0)
            self._progress(min(self._done, self._total), self._total)


class _Counted:
    """Counts the bytes of one request, before each is written. ModelError if there are more than announced."""

    def __init__(self, tally: _Tally, file: RemoteFile, num_bytes: int) -> None:
        self._tally, self._file, self._num_remaining = tally, file, num_bytes

    def update(self, count: float | None = 1) -> None:
        self._num_remaining -= int(count or 0)
        if self._num_remaining < 0:
            raise ModelError(
                f"{self._file.name} came with more than the {self._file.num_bytes} bytes that the hub announced, and "
                "was not kept: try again"
            )
        self._tally.update(count)


def _repositories_at(folder: Path, cache: HFCacheInfo) -> frozenset[CachedRepoInfo]:
    return frozenset(repo for repo in cache.repos if repo.repo_path.name == folder.name)


def _files_of(path: Path, repos: Iterable[CachedRepoInfo]) -> Iterator[CachedFileInfo]:
    """Yield the parts of the GGUF model at `path`, in all snapshots of these repositories."""
    parts = set(map(_entry, part_paths(path)))
    for repo in repos:
        for revision in repo.revisions:
            yield from (file for file in revision.files if _entry(file.file_path) in parts)


def remove(path: Path) -> int:
    """Remove a snapshot, or one GGUF model of it by any part, and what no other needs of its repository. Returns the
    bytes that are free then.

    Commits of two repositories can have one hash, and links can lead into another repository: nothing that belongs to
    another is removed. Raises ModelError for a repository that the hub's library cannot read, ConfigError for files
    that another one links to or that the system keeps.
    """
    repository = next(folder for folder in path.parents if folder.name.startswith("models--"))
    if link := next((link for link in (path, repository) if link.is_symlink() and link.is_dir()), None):
        link.unlink()
        return 0
    cache = scan_cache_dir(repository.parent)
    own = _repositories_at(repository, cache)
    if not own:
        why = "; ".join(str(warning) for warning in cache.warnings if repository.name in str(warning))
        raise ModelError(f"{path} was not removed, as its repository is incomplete ({why}): remove {repository}")
    if path.is_dir():
        chosen = replace(cache, repos=own).delete_revisions(path.name)
    else:
        chosen = cache.delete_files(*_files_of(path, own))
    _refuse_linked(cache, own, chosen)
    chosen.execute()
    if os.path.lexists(path):
        raise ConfigError(f"{path} could not be removed: check the permissions of its folder")
    return chosen.expected_freed_size


def _refuse_linked(cache: HFCacheInfo, own: frozenset[CachedRepoInfo], chosen: DeleteCacheStrategy) -> None:
    """Raise ConfigError if a file that would be removed is one of another repository, by a link."""
    blobs, folders = set(map(_entry, chosen.blobs)), set(map(_entry, chosen.repos))
    for repo in cache.repos - own:
        for file in (file for revision in repo.revisions for file in revision.files):
            blob = _entry(file.blob_path)
            if blob in blobs or not folders.isdisjoint(blob.parents):
                raise ConfigError(f"{repo.repo_id} has a link to {blob}: remove {repo.repo_id} first")


def _entry(path: Path) -> Path:
    """Return where an entry of a folder is, whatever links lead to the folder. The entry may be a link itself."""
    return path.parent.resolve() / path.name


def _remote_file(entry: RepoFile) -> RemoteFile:
    return RemoteFile(
        name=entry.path, num_bytes=entry.size, digest=entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
    )


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.forebay.incomplete")


def _check(path: Path, file: RemoteFile) -> None:
    """Raise ModelError, and remove the file, if it is not the one that the hub announced."""
    with path.open("rb") as source:
        digest = file.hash_of(iter(lambda: source.read(_CHUNK_BYTES), b""))
    if digest != file.digest:
        path.unlink()
        raise ModelError(
            f"{file.name} came with {file.algorithm} {digest}, not {file.digest}, and was not kept: try again"
        )
