"""Repositories of the Hugging Face hub: what is in them, and files of them brought into the cache that all tools share.

Spoken with the hub's own library, which is imported here alone. It keeps nothing of a large file whose download was
ended, so those are fetched here, into the place where it looks for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_download, hf_hub_url, scan_cache_dir
from huggingface_hub import constants as hub_settings
from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from forebay.base.errors import ConfigError, ModelError
from forebay.base.package import __version__
from forebay.base.progress import Progress
from forebay.base.units import human_bytes
from forebay.formats.hub_names import BLOBS, SNAPSHOTS, HubModel, hub_folder, repository_folder

hub_settings.HF_HUB_DISABLE_TELEMETRY = True  # which asks the hub what it should look for here, and tells it

_ENDPOINT: Final = "https://huggingface.co"
_OURS: Final[dict[str, Any]] = {"library_name": "forebay", "library_version": __version__}
_WORKERS: Final = 4  # files at a time
_CHUNK_BYTES: Final = 1 << 20
_SMALL: Final = (".json", ".jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """`sha256` is None of a small file, which the hub knows by another hash."""

    name: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model's at one commit, and its files by name."""

    model: HubModel
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def descriptions(self) -> list[str]:
        """The files beside weights that tools read: configurations, tokenizer, templates."""
        return [name for name in self.files if "/" not in name and name.endswith(_SMALL)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """`HF_ENDPOINT`, with `HF_TOKEN` or what `hf auth login` has kept, and where the cache is."""

    endpoint: str = field(default_factory=lambda: os.environ.get("HF_ENDPOINT", _ENDPOINT).rstrip("/"))
    token: str | None = field(default_factory=lambda: get_token())
    cache: Path = field(default_factory=hub_folder)

    def look(self, model: HubModel) -> Repository:
        """Ask what is there. Raises ConfigError and ModelError that say what stands in the way."""
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ConfigError(f"{model} is not in {self.cache}, and HF_HUB_OFFLINE is set: unset it to fetch the model")
        api = HfApi(endpoint=self.endpoint, token=self.token, **_OURS)
        with self._in_words(model):
            commit = api.model_info(model.repo, revision=model.revision).sha
            if commit is None:
                raise ModelError(f"{self.endpoint} has told no commit of {model}: is it a hub?")
            tree = list(api.list_repo_tree(model.repo, recursive=True, revision=commit))
        files = [
            RemoteFile(name=file.path, num_bytes=file.size, sha256=file.lfs.sha256 if file.lfs else None)
            for file in tree
            if isinstance(file, RepoFile)
        ]
        return Repository(model=model, commit=commit, files={file.name: file for file in files})

    def fetch(self, repository: Repository, names: Sequence[str], progress: Progress) -> Path:
        """Bring these files to the cache, going on where an earlier call was ended; the snapshot's folder."""
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
        return self._folder(repository) / SNAPSHOTS / repository.commit

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
        return self._folder(repository) / BLOBS / str(file.sha256)

    def _fetch(self, repository: Repository, file: RemoteFile, tally: _Tally) -> None:
        by_us = file.sha256 is not None and file.num_bytes <= MAX_HTTP_DOWNLOAD_SIZE
        if by_us:
            self._fetch_blob(repository, file, tally)
        of: dict[str, Any] = {
            "revision": repository.commit,
            "cache_dir": self.cache,
            "endpoint": self.endpoint,
            **_OURS,
        }
        # Of what is there already it makes a link.
        hf_hub_download(repository.model.repo, file.name, token=self.token, tqdm_class=_Silent, **of)
        if not by_us:
            tally.update(file.num_bytes)

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
            if have < end:
                self._get(repository, file, sink, have, end, tally)
            if end == file.num_bytes:
                _check(_partial(blob), file)
                _partial(blob).replace(blob)
        return None

    def _get(
        self, repository: Repository, file: RemoteFile, sink: BinaryIO, have: int, end: int, tally: _Tally
    ) -> None:
        url = hf_hub_url(repository.model.repo, file.name, revision=repository.commit, endpoint=self.endpoint)
        headers: dict[str, Any] = build_hf_headers(token=self.token, **_OURS)
        if end < file.num_bytes:
            headers["Range"] = f"bytes=0-{end - 1}"
        http_get(url, sink, resume_size=have, headers=headers, expected_size=end, _tqdm_bar=tally)
        sink.flush()

    def _check_space(self, repository: Repository, files: Sequence[RemoteFile]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        there = self._folder(repository) / SNAPSHOTS / repository.commit
        need = sum(file.num_bytes for file in files if not (there / file.name).exists())
        free = shutil.disk_usage(self.cache).free
        if need > free:
            raise ConfigError(
                f"{self.cache} has {human_bytes(free)} free and {repository.model} needs {human_bytes(need)}: remove "
                "models (`forebay models rm`), or set HF_HOME to a larger disk"
            )

    @contextlib.contextmanager
    def _in_words(self, model: HubModel) -> Iterator[None]:
        """What the library raises as what a user can do about it."""
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
        except OSError as error:
            raise ConfigError(f"{model} cannot be fetched to {self.cache}: {error}; {again}") from error


class _Tally:
    """Bytes of several files together. Whoever counts after `ended` is ended too."""

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


class _Silent:
    """In the place of the library's own bar for each file."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, count: float | None = 1) -> None: ...


def remove(path: Path) -> int:
    """Remove a snapshot, or one file of it, and what no other needs of its repository; the bytes that are free then."""
    cache = scan_cache_dir(next(folder.parent for folder in path.parents if folder.name.startswith("models--")))
    if path.is_dir():
        chosen = cache.delete_revisions(path.name)
    else:
        files = (file for repo in cache.repos for revision in repo.revisions for file in revision.files)
        chosen = cache.delete_files(*(file for file in files if file.file_path == path))
    chosen.execute()
    return chosen.expected_freed_size


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.forebay.incomplete")


def _check(path: Path, file: RemoteFile) -> None:
    """Raise ModelError, and remove it, where it is not what the hub says that it is."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.sha256:
        path.unlink()
        raise ModelError(
            f"{file.name} came with sha256 {digest.hexdigest()}, not {file.sha256}, and was not kept: try again"
        )
