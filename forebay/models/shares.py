"""Which models can be split among ranks: those all of whose parts declare that they are built for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from forebay.base.errors import ConfigError


def check_for_ranks(spec: Any) -> None:
    """Raise ConfigError, with the names of their types, if parts of the model are not built for ranks.

    A part is built for ranks if `for_ranks` of its description is true: a rank has its share of the part and exchanges
    what others need, or does the same as all ranks, which is for small parts. Without this attribute it is not.
    """
    missing = sorted({type(part).__name__.removesuffix("Spec") for part in _parts(spec) if not _is_for_ranks(part)})
    if missing:
        raise ConfigError(
            f"this model cannot be split among ranks, since {', '.join(missing)} is not built for that: "
            "leave out --tp-size"
        )


def _is_for_ranks(part: Any) -> bool:
    return bool(getattr(part, "for_ranks", False))


def _parts(spec: Any) -> Iterator[Any]:
    """Yield each part of a description that is built, the outer ones first."""
    if isinstance(spec, tuple):
        for each in spec:
            yield from _parts(each)
    elif dataclasses.is_dataclass(spec):
        if hasattr(spec, "build"):
            yield spec
        for field in dataclasses.fields(spec):
            yield from _parts(getattr(spec, field.name))
