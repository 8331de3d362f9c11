"""Vision encoders in files of their own beside a GGUF model, by their names: `mmproj-F16.gguf`, or with the name of the
model, as `mmproj-SmolVLM-256M-Instruct-f16.gguf`, `gemma-3-4b-it.mmproj-f16.gguf` or `gemma-3-4b-it-mmproj.gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from forebay.base.errors import ModelError
from forebay.formats.gguf_parts import SUFFIX
from forebay.formats.hub_names import REVISIONS

PREFERRED: Final = ("F16", "BF16", "Q8_0", "F32")
"""Types of weights, the best first: an encoder computes in 16 bits, and files of F32 are twice as large."""

_CODES: Final = r"(?:[-._](?P<codes>BF16|F16|F32|I?Q\d\w*))?\.gguf"
_NAMES: Final = (
    re.compile(rf"(?i)mmproj(?:[-._](?P<model>.+?))??{_CODES}"),
    re.compile(rf"(?i)(?P<model>.+)[-._]mmproj{_CODES}"),
)
_ANY_MODEL: Final = re.compile(r"|model(?:-.+)?")  # `mmproj-model-f16-4B.gguf` is beside `gemma-3-4b-it-q4_0.gguf`
_SEPARATORS: Final = re.compile(r"[-._]")


def mmproj_of(names: Iterable[str], model: str) -> list[str]:
    """Return the encoder's file for the GGUF file `model` among `names`, paths in one repository or names in one
    folder; [] if there is none, and several if their names are equally good.

    A file counts if it is in the folder of `model` or in one around it; the nearest folder comes first. It must name no
    model, or one with which the name of `model` begins, whatever the separators. The longest such name comes first,
    then the first type of `PREFERRED`."""
    at, own = PurePosixPath(model), _letters(model.rpartition("/")[2])
    paths = [(PurePosixPath(name), name) for name in names]
    for folder in at.parents:
        there = {name: _rank(path.name, own) for path, name in paths if path.parent == folder}
        ranks = {name: rank for name, rank in there.items() if rank is not None}
        if ranks:
            best = min(ranks.values())
            return sorted(name for name, rank in ranks.items() if rank == best)
    return []


def _rank(name: str, model: str) -> tuple[int, int] | None:
    """Return the sort key of a file: how little of the model its name has, then its type. None if it is for no such
    model."""
    found = next((found for pattern in _NAMES if (found := pattern.fullmatch(name))), None)
    if found is None or not name.endswith(SUFFIX):
        return None
    named = (found["model"] or "").lower()
    named = "" if _ANY_MODEL.fullmatch(named) else _letters(named)
    if not model.startswith(named):
        return None
    codes = (found["codes"] or "").upper()
    return -len(named), PREFERRED.index(codes) if codes in PREFERRED else len(PREFERRED)


def _letters(name: str) -> str:
    """Return a name without separators: `Qwen3VL-8B` is `Qwen3-VL-8B`."""
    return _SEPARATORS.sub("", name.lower())


def mmproj_beside(path: Path) -> Path | None:
    """Return the encoder's file in the folder of the GGUF file `path`, or in the folders around it up to that of its
    revision in the hub's cache; None if there is none, and for other models. Raises ModelError if several are equally
    good."""
    if path.suffix != SUFFIX:
        return None
    root = _root(path)
    folders = [folder for folder in path.parents if folder.is_relative_to(root)]
    files = (entry for folder in folders for entry in folder.glob(f"*{SUFFIX}") if entry.is_file())
    found = mmproj_of((file.relative_to(root).as_posix() for file in files), path.relative_to(root).as_posix())
    if len(found) > 1:
        raise ModelError(
            f"{path.name} has {len(found)} files of vision encoders beside it, and none of them fits best "
            f"({', '.join(found)}): name one with --mmproj, or `--mmproj none` to serve text alone"
        )
    return root / found[0] if found else None


def _root(path: Path) -> Path:
    """Return the folder of a file; in the hub's cache that of the revision."""
    return next((folder for folder in path.parents if folder.parent.name == REVISIONS), path.parent)
