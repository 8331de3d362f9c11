"""Vision encoders in files of their own beside a GGUF model, by their names: `mmproj-F16.gguf`, or with the name of the
model in between, as `mmproj-SmolVLM-256M-Instruct-f16.gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forebay.formats.gguf_parts import SUFFIX
from forebay.formats.hub_names import REVISIONS

PREFIX: Final = "mmproj"
PREFERRED: Final = ("F16", "BF16", "Q8_0", "F32")
"""Types of weights, the best first: an encoder computes in 16 bits, and files of F32 are twice as large."""

_NAME: Final = re.compile(r"(?i)mmproj(?:[-._](?P<model>.+?))??(?:[-._](?P<codes>BF16|F16|F32|I?Q\d\w*))?\.gguf")
_ANY_MODEL: Final = ("", "model")


def mmproj_of(names: Iterable[str], model: str) -> str | None:
    """Return the encoder's file for the GGUF file `model` among `names`, paths in one repository or names in one
    folder. A file counts if it names no model, or one with which the name of `model` begins. Of several the first of
    `PREFERRED` is returned, then the first by name."""
    own = model.rpartition("/")[2].lower()
    ranked = [(rank, name) for name in names if (rank := _rank(name.rpartition("/")[2], own)) is not None]
    return min(ranked)[1] if ranked else None


def _rank(name: str, model: str) -> tuple[bool, int] | None:
    """Return the sort key of a file: those that name the model first, then by type. None if it is for no such model."""
    found = _NAME.fullmatch(name)
    if found is None or not name.endswith(SUFFIX):
        return None
    named = (found["model"] or "").lower()
    if named not in _ANY_MODEL and not model.startswith(named):
        return None
    codes = (found["codes"] or "").upper()
    return named in _ANY_MODEL, PREFERRED.index(codes) if codes in PREFERRED else len(PREFERRED)


def mmproj_beside(path: Path) -> Path | None:
    """Return the encoder's file in the folder of the GGUF file `path`, or in the folders around it up to that of its
    revision in the hub's cache; None if there is none, and for other models."""
    if path.suffix != SUFFIX:
        return None
    for folder in _folders(path):
        there = [entry.name for entry in folder.glob(f"{PREFIX}*{SUFFIX}") if entry.is_file()]
        if (found := mmproj_of(there, path.name)) is not None:
            return folder / found
    return None


def _folders(path: Path) -> list[Path]:
    """Return the folder of a file; in the hub's cache those around it as well, up to that of the revision."""
    around = list(path.parents)
    revision = next((at for at, folder in enumerate(around) if folder.parent.name == REVISIONS), 0)
    return around[: revision + 1]
