"""Models named by their repository on the Hugging Face hub, and their files in the cache that all tools share. Nothing
is fetched here: `hub` does that.

The cache has a folder for each repository, models--ORG--NAME. There refs/REVISION holds a commit, and snapshots/COMMIT
links into blobs, which has the files by their hashes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.base.errors import ModelError
from forebay.formats.gguf_parts import first_name, is_model, part_names
from forebay.formats.safetensors import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    weight_files,
)

MAIN: Final = "main"
REVISIONS: Final = "snapshots"
BLOBS: Final = "blobs"
_PART: Final = r"[A-Za-z0-9_][\w.-]*"
_NAME: Final = re.compile(
    rf"(?:hf://(?:models/)?)?(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@:/]+))?(?:/(?P<file>[^:]+\.gguf))?"
    rf"(?::(?P<codes>{_PART}))?"
)
_CODES: Final = re.compile(r"(?i)(?:^|[-._])((?:UD-)?[IT]?Q\d\w*|BF16|F16|F32|(?:MX|NV)FP4\w*)(?=[-._]|$)")
_USUAL: Final = "Q4_K_M"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """`org/name`; of its GGUF files the one called `file`, or the one whose weights are in `codes`, such as Q4_K_M."""

    repo: str
    revision: str = MAIN
    file: str = ""
    codes: str = ""

    def __post_init__(self) -> None:
        """The revision and the file become paths of the cache. Raises ModelError."""
        for what, value in (("revision", self.revision), ("file", self.file or MAIN)):
            if not value.isprintable() or any(part in ("", ".", "..") for part in value.split("/")):
                raise ModelError(f"{self.repo} can have no {what} {value!r}: its parts between / are plain names")

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else f":{self.codes}" if self.codes else "")


def hub_model(name: str, revision: str | None = None) -> HubModel | None:
    """Parse `org/name`, `org/name:Q4_K_M` or `hf://org/name@revision/file.gguf`; None for a text that is no such name.
    A `revision` in the name has priority over the other."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return HubModel(
        found["repo"], found["revision"] or revision or MAIN, found["file"] or "", (found["codes"] or "").upper()
    )


def hub_folder() -> Path:
    """Return the cache's folder by the environment: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, which is in
    `XDG_CACHE_HOME`."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(named or os.path.join(home, "hub"))).expanduser()


def repository_folder(repo: str, cache: Path | None = None) -> Path:
    """Return the repository's folder in the hub's cache, whether or not it exists."""
    return (cache or hub_folder()) / f"models--{repo.replace('/', '--')}"


def repository_of(path: Path) -> str | None:
    """`org/name` of a snapshot, or of a file in one; None of any other path."""
    for folder in (path, *path.parents):
        if folder.parent.name == REVISIONS and folder.parent.parent.name.startswith("models--"):
            return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return None


def revisions(cache: Path | None = None) -> Iterator[tuple[str, str, Path]]:
    """Yield all revisions in the cache: the repository, the revision that is here (or its commit), and its folder."""
    for folder in sorted((cache or hub_folder()).glob("models--*")):
        repo, refs = folder.name.removeprefix("models--").replace("--", "/"), folder / "refs"
        named = {path.read_text().strip(): str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file()}
        for here in sorted(folder.glob("snapshots/*")):
            yield repo, named.get(here.name, here.name[:12]), here


def revision_folder(model: HubModel, cache: Path | None = None) -> Path | None:
    """The folder of the revision, if there is one; of its files it may lack any."""
    folder = repository_folder(model.repo, cache)
    try:
        commit = (folder / "refs" / model.revision).read_text().strip()
    except OSError:
        commit = model.revision if COMMIT.fullmatch(model.revision) else ""
    found = folder / REVISIONS / commit
    return found if commit and found.is_dir() else None


def find_in_cache(model: HubModel, cache: Path | None = None) -> Path:
    """Return the folder, or the GGUF file, to serve. ModelError if it is not here, or not complete."""
    folder = revision_folder(model, cache)
    pull = f"`forebay models pull {model}{'' if model.revision == MAIN else f' --revision {model.revision}'}`"
    if folder is None:
        raise ModelError(f"{model} is not on this machine: {pull} fetches it (nothing else is called so here)")
    # Links may lead nowhere.
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.exists()]
    try:
        chosen = chosen_gguf(names, model)
    except ModelError as error:
        raise ModelError(f"{error.message}, as far as {folder} goes: {pull} asks the hub") from None
    if chosen is not None:
        return folder / chosen
    _check_complete(folder, names, model, pull)
    return folder


def _check_complete(folder: Path, names: Sequence[str], model: HubModel, pull: str) -> None:
    """Raises ModelError unless `names` in `folder` have all that is needed of the model; `pull` is the remedy."""
    if model.codes or model.file or "config.json" not in names:
        raise ModelError(f"{folder}: of {model} it has {', '.join(sorted(names)[:8]) or 'nothing'}: {pull} fetches it")
    missing = [name for name in weight_files(folder) if name not in names]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} files of {model} are missing ({missing[0]}): {pull} fetches them")


def find_adapter(name: str) -> Path:
    """Return the folder of the adapter that a user calls `name`: a path, or `org/name` or `org/name@revision` of the
    hub's cache. ModelError if the hub's is not here; a path is returned even if it does not exist."""
    path, model = Path(name).expanduser(), hub_model(name)
    if path.exists() or model is None:
        return path
    if model.file or model.codes:
        raise ModelError(f"{name}: adapters in GGUF files are not read: name a repository with {ADAPTER_NAME}")
    folder = revision_folder(model)
    if folder is None or not is_adapter(entry.name for entry in folder.iterdir() if entry.exists()):
        at = "" if model.revision == MAIN else f" --revision {model.revision}"
        raise ModelError(
            f"the adapter {name} is not on this machine: `forebay models pull {model}{at}` fetches it (no folder is "
            "called so here)"
        )
    return folder


def absent_adapter(name: str) -> HubModel | None:
    """Return the hub's adapter of this name, if it is not here, or not complete."""
    try:
        find_adapter(name)
    except ModelError:
        model = hub_model(name)
        return None if model is None or model.file or model.codes else model
    return None


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether files of these names are an adapter (LoRA)."""
    return {ADAPTER_NAME, ADAPTER_WEIGHTS_NAME} <= set(names)


def chosen_gguf(names: Iterable[str], model: HubModel) -> str | None:
    """Choose the GGUF file among a repository's files, of several parts the first. None if the repository has
    safetensors and no GGUF file is requested, or has no GGUF file. ModelError if several match, none of the requested
    ones exists, or parts are missing."""
    names = set(names)
    if model.file:
        return _first_part(model.file, names, model) if model.file in names else None
    if not model.codes and names & {SINGLE_NAME, INDEX_NAME}:
        return None
    there = {first_name(name): _gguf_codes(name) for name in sorted(names) if is_model(name)}
    if not there:
        return None
    return _first_part(_with_codes(there, model), names, model)


def _with_codes(there: Mapping[str, str], model: HubModel) -> str:
    """Return the one file with the requested codes, or the usual ones, given the codes of each file. Raises ModelError
    if there is no such file, or several."""
    asked = [name for name, codes in there.items() if model.codes in ("", codes, codes.removeprefix("UD-"))]
    all_codes = ", ".join(sorted(set(there.values())))
    if not asked:
        raise ModelError(f"{model.repo} has no {model.codes}; it has {all_codes}")
    exact = [name for name in asked if there[name] == (model.codes or _USUAL)]
    chosen, *others = exact or asked
    if others:
        named = f"{model.repo}:{there[chosen]}" if there[others[0]] != there[chosen] else f"hf://{model.repo}/{chosen}"
        raise ModelError(f"{model.repo} has several GGUF files ({all_codes}): name one, such as {named}")
    return chosen


def _first_part(name: str, names: set[str], model: HubModel) -> str:
    parts = part_names(name)
    missing = [part for part in parts if part not in names]
    if missing:
        raise ModelError(f"{model.repo} has {len(parts) - len(missing)} of {len(parts)} parts: {missing[0]} is missing")
    return parts[0]


def _gguf_codes(name: str) -> str:
    """`Q4_K_M` of a model's file, empty where its name says nothing."""
    found = _CODES.findall(name.rpartition("/")[2].removesuffix(".gguf"))
    return found[-1].upper() if found else ""
