"""The fields of a value, for a value of a subclass."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def values_of(value: DataclassInstance | msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a dataclass or of a struct by name: `Sub(**values_of(base), own=1)`. mypy checks that the
    class of `value` is a base of the one that is made (`scripts/splats.py`)."""
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else [field.name for field in fields(value)]
    return {name: getattr(value, name) for name in names}
