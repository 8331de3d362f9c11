"""The texts of a vocabulary in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Self, overload

_INNER: Final = bytes(range(0x80, 0xC0))  # bytes that begin no character


class Strings(Sequence[str]):
    """Texts in one piece of UTF-8, each made when it is asked for: 100,000 of a vocabulary take 1 MB instead of 6, and
    leave no holes behind. Equal to any sequence of the same texts."""

    __slots__ = ("_data", "_ends")

    def __init__(self, texts: Iterable[bytes]) -> None:
        """Raises UnicodeDecodeError."""
        data, ends = bytearray(), array("I", [0])
        for text in texts:
            data += text
            ends.append(len(data))
        self._data, self._ends = bytes(data), ends
        data.decode()
        data.append(0)  # behind the last text
        firsts = bytes(map(data.__getitem__, ends))
        if len(firsts.translate(None, _INNER)) < len(firsts):
            raise UnicodeDecodeError("utf-8", self._data, 0, len(self._data), "a text ends inside a character")

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Pack texts, which keep their order."""
        return cls(text.encode() for text in texts)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[i] for i in at]
        return self._data[self._ends[at] : self._ends[at + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        return iter([self._data[start:end].decode() for start, end in pairwise(self._ends)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    def __repr__(self) -> str:
        return f"{type(self).__name__}.of({[*self]!r})"
