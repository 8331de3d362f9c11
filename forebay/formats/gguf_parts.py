"""GGUF models in several files: `m-00001-of-00003.gguf` and so on, as `llama-gguf-split` names and marks them.

Each part has tensors of its own, and `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts
together). The other metadata is in the first part alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.formats.files import is_there
from forebay.formats.safetensors import INDEX_NAME, SINGLE_NAME

MAX_PARTS: Final = 512  # several times what the largest published models have
SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"(?s)(.*)-(\d{5})-of-(\d{5})\.gguf")
_OTHERS: Final = re.compile(r"(?i)(?:.*[-._])?(?:mmproj|imatrix)(?:[-._].*)?\.gguf")  # files beside a model
_SAME: Final = ("general.architecture", "general.name")  # in every part that has them
_ADVICE: Final = "get all parts of one model again"


def first_name(name: str) -> str:
    """Return the name of the first part of the model that the file `name` belongs to: `name` if it is no part."""
    found = _part(name)
    return name if found is None else f"{found[1]}-{1:05}-of-{found[3]}{SUFFIX}"


def _part(name: str) -> re.Match[str] | None:
    found = _PART.fullmatch(name)
    return found if found is not None and 1 <= int(found[2]) <= int(found[3]) else None


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model that the file `name` belongs to, in order: `name` if it is no part.
    Raises ModelError for more than `MAX_PARTS`."""
    found = _part(name)
    if found is None:
        return [name]
    if int(found[3]) > MAX_PARTS:
        raise ModelError(f"{name}: it is one of {int(found[3])} parts; at most {MAX_PARTS} are read")
    return [f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}" for number in range(1, int(found[3]) + 1)]


def whole_name(name: str) -> str:
    """Return the name of a file without what makes it one of several parts."""
    found = _PART.fullmatch(name)
    return name if found is None else f"{found[1]}{SUFFIX}"


def is_model(name: str) -> bool:
    """Return whether a file of this name is a GGUF model or a part of one."""
    last = name.rpartition("/")[2]
    return last.endswith(SUFFIX) and _OTHERS.fullmatch(last) is None


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model that `path` is a part of, in order; they need not be there."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_parts(paths: Iterable[Path]) -> list[Path]:
    """Return of each model among these files the first part that is there, in the order of names."""
    found: dict[Path, Path] = {}
    for path in sorted(paths):
        found.setdefault(path.with_name(first_name(path.name)), path)
    return list(found.values())


def model_file(path: Path) -> Path:
    """Return the file to open for a model at `path`: the first part of several, or the one GGUF model of a folder that
    has no safetensors. Any other path is returned as it is."""
    if not path.is_dir():
        return path.with_name(first_name(path.name)) if path.suffix == SUFFIX else path
    if is_there(path / SINGLE_NAME) or is_there(path / INDEX_NAME):
        return path
    models = first_parts(entry for entry in path.iterdir() if is_model(entry.name))
    return models[0].with_name(first_name(models[0].name)) if len(models) == 1 else path


def existing_parts(path: Path) -> list[Path]:
    """Return the files of the model that `path` is a part of. Raises ModelError unless all are there."""
    paths = part_paths(path)
    missing = [] if len(paths) == 1 else [part.name for part in paths if not is_there(part)]
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of the {len(paths)} parts of the model are missing ({missing[0]}): all must be in "
            "one folder, under the names that they were published with"
        )
    return paths


def check_parts(paths: Sequence[Path], metadata: Sequence[Mapping[str, Any]], num_tensors: int) -> None:
    """Raise ModelError unless the metadata of the files says that they are all parts of one model, in this order, which
    has `num_tensors` tensors."""
    count = len(paths)
    if count == 1:
        declared = metadata[0].get("split.count", 1)
        if type(declared) is int and declared <= 1:
            return
        raise ModelError(
            f"{paths[0]}: it is one of {brief(declared)} parts of a model (split.count), and its name does not end in "
            f"-00001-of-00002{SUFFIX} or the like: give the parts the names that they were published with"
        )
    for number, (path, own) in enumerate(zip(paths, metadata, strict=True)):
        wanted = {"split.no": number, "split.count": count, "split.tensors.count": num_tensors}
        for key, value in wanted.items():
            if type(own.get(key)) is not int or own[key] != value:
                found = brief(own[key]) if key in own else "missing"
                raise ModelError(
                    f"{path}: its {key} is {found} and must be {value}, that of part {number + 1} of {count} with "
                    f"{num_tensors} tensors in all: {_ADVICE}"
                )
        for key in _SAME:
            first = metadata[0].get(key)
            if key in own and not _equal(own[key], first):
                raise ModelError(
                    f"{path}: its {key} is {brief(own[key])}, and that of {paths[0].name} {brief(first)}, so they are "
                    f"parts of different models: {_ADVICE}"
                )


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one == other
