"""Typed, bounded access to the fields of an untrusted configuration, with a record of the fields that no reader
used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from forebay.base.errors import ModelError, brief

MAX_SIZE: Final = 1 << 24
MAX_LAYERS: Final = 4096
MAX_NUMBER: Final = 1e30  # whole numbers of a file have any length, and those of 400 digits are no floats
MAX_EOS_TOKEN_IDS: Final = 64


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Fields:
    """`unread` are the fields of the file that no reader has used yet, except nulls; all objects derived from this one
    share it. `sources` has, for a name that is not in the file itself, the fields from which its value comes.

    If a file has no value, the default counts. A null counts as no value, except for a flag: there it means false, as
    in transformers.
    """

    raw: Mapping[str, Any]
    where: str
    unread: set[str] = field(default_factory=set)
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of_file(raw: Mapping[str, Any], where: str) -> Fields:
        """Wrap the fields of a file; `where` names it in errors. Fields with a null do not count as unread."""
        return Fields(raw, where, {name for name, value in raw.items() if value is not None})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value as it is in the file, None if there is none."""
        self.unread.difference_update(self.sources.get(name, (name,)))
        value = self.raw.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Return whether it is there, be it a null."""
        self.unread.difference_update(self.sources.get(name, (name,)))
        return name in self.raw

    def is_null(self, name: str) -> bool:
        """Return whether the field is there with a null."""
        return self.has(name) and self.raw[name] is None

    def replaced(self, **values: Any) -> Fields:
        """With other values in the place of the file's, which are not read by reading these."""
        return replace(self, raw={**self.raw, **values}, sources={**self.sources, **dict.fromkeys(values, ())})

    def without(self, *names: str) -> Fields:
        """Return the fields without these; asking for one of them gives its default."""
        left = {name: value for name, value in self.raw.items() if name not in names}
        return replace(self, raw=left, sources={**self.sources, **dict.fromkeys(names, ())})

    def dropped(self, *names: str) -> Fields:
        """Without fields that have no effect in this model, whatever they say."""
        self.unread.difference_update(names)
        return self.without(*names)

    def renamed(self, names: Mapping[str, str], *, nulls: bool = False) -> Fields:
        """Return the fields with the values of the names on the left also under the names on the right, if they are
        present. `nulls`: a null counts as a value. Reading the new name reads both."""
        there = {old: new for old, new in names.items() if old in self.raw and (nulls or self.raw[old] is not None)}
        both = {new: (*self.sources.get(new, (new,)), *self.sources.get(old, (old,))) for old, new in there.items()}
        values = {new: self.raw[old] for old, new in there.items()}
        return replace(self, raw={**self.raw, **values}, sources={**self.sources, **both})

    def within(self, name: str) -> Fields:
        """Return the fields of an object in the file; none if it is absent. They are unread by themselves."""
        inner = self.get(name, {})
        if not isinstance(inner, dict):
            raise self.wrong(name, "an object")
        sources = {key: (f"{name}.{key}",) for key in inner}
        self.unread.update(f"{name}.{key}" for key, value in inner.items() if value is not None)
        return Fields(inner, f"{self.where}: {name}", self.unread, sources)

    def under(self, other: Fields) -> Fields:
        """With the fields of `other` before these."""
        return replace(self, raw={**self.raw, **other.raw}, sources={**self.sources, **other.sources})

    def wrong(self, name: str, expected: str) -> ModelError:
        """Return the error for a field's value, which says what it must be."""
        return ModelError(f"{self.where}: {name} is {brief(self.raw.get(name))}; it must be {expected}")

    def only(self, name: str, *values: Any) -> None:
        """Raise ModelError if the field is present and has none of these values."""
        if not any(self.get(name) == value for value in (None, *values)):
            raise self.wrong(name, " or ".join(map(str, values)))

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        return value

    def size(self, name: str, *, default: int | None = None, most: int = MAX_SIZE, least: int | None = None) -> int:
        """Return a whole number from `least` to `most`. `least` is 1 by default, or 0 if the default is 0. Raises
        ModelError for other values, and for an absent field without default."""
        value = self._or_default(name, default)
        if least is None:
            least = 1 if default != 0 else 0
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, *, default: float) -> float:
        """Return a number of at least 0. Raises ModelError for anything else."""
        value = self._or_default(name, default)
        if not is_number(value) or not 0 <= value <= MAX_NUMBER:
            raise self.wrong(name, "a number of at least 0")
        return float(value)

    def positive(self, name: str, *, default: float) -> float:
        """Return a number above 0; neither 0 nor a null means "off" to transformers. Raises ModelError for them."""
        value = self.number(name, default=default)
        if not value or self.is_null(name):
            raise self.wrong(name, "above 0")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false; a null is false. Raises ModelError for anything else."""
        value = False if self.is_null(name) else self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def ints(self, name: str, *, default: list[int]) -> list[int]:
        """Return a list of at most `MAX_LAYERS` whole numbers. Raises ModelError for anything else."""
        value = self._or_default(name, default)
        if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(map(_is_size, value)):
            raise self.wrong(name, f"a list of at most {MAX_LAYERS} whole numbers")
        return value

    def one_of_each(self, name: str, count: int, possible: Collection[str]) -> list[str]:
        """A list that says for each of `count` layers which it is."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(item in possible for item in value):
            raise self.wrong(name, f"a list of {count}, each {' or '.join(possible)}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a field that holds none, one or a list; each once, all in the vocabulary."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids) or len(ids) > MAX_EOS_TOKEN_IDS:
            raise ModelError(f"{self.where}: {name} is {brief(value)}; ids of 0..{vocab_size - 1} are possible")
        return tuple(dict.fromkeys(ids))
