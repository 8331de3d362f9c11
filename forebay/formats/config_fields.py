"""Typed, bounded access to the fields of a configuration that somebody else wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.base.errors import ModelError

MAX_SIZE: Final = 1 << 24
MAX_EOS_TOKEN_IDS: Final = 64


@dataclass(frozen=True, slots=True)
class Fields:
    """A missing field and a null one are the same: transformers writes both."""

    raw: Mapping[str, Any]
    where: str

    def wrong(self, name: str, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {name} is {str(self.raw.get(name))[:80]!r}; it must be {expected}")

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        return value

    def size(self, name: str, *, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self._or_default(name, default)
        least = 1 if default != 0 else 0
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, *, default: float) -> float:
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.wrong(name, "a number of at least 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def ints(self, name: str, *, default: list[int]) -> list[int]:
        value = self._or_default(name, default)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_SIZE for item in value):
            raise self.wrong(name, "a list of whole numbers")
        return value

    def token_ids(self, name: str, vocab_size: int, *, more: Any = None) -> tuple[int, ...]:
        """The ids of a field that holds none, one or a list, followed by `more`; each once, all in the vocabulary."""
        found: list[int] = []
        for value in (self.raw.get(name), more):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(item) is int and 0 <= item < vocab_size for item in ids) or len(ids) > MAX_EOS_TOKEN_IDS:
                raise ModelError(f"{self.where}: {name} is {str(value)[:80]}; ids of 0..{vocab_size - 1} are possible")
            found += ids
        return tuple(dict.fromkeys(found))
