"""The settings of a combined circumstance that are enough to change an answer, found by halves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

MOST_RUNS: Final = 8  # enough for any two of eight settings

Differs = Callable[[Sequence[str]], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Blame:
    """The `settings` with which answers differ; none if other requests beside them are enough. With fewer of them no
    answer differed, if it `is_smallest`; otherwise the runs ended before that was known."""

    settings: tuple[str, ...]
    is_smallest: bool
    num_runs: int


class _Search:
    """A search among settings with all of which answers differ: those that are `needed`, and the `others` that may
    be."""

    def __init__(self, settings: Sequence[str], differs: Differs, most: int) -> None:
        self.needed, self.others, self.num_runs = list[str](), list(settings), 0
        self._differs, self._most = differs, most

    async def differs(self, num_others: int) -> bool:
        """Return whether answers differ with what is needed and the first `num_others` of the others."""
        self.num_runs += 1
        return await self._differs([*self.others[:num_others], *self.needed])

    async def run(self) -> bool:
        """Narrow both lists down; return whether nothing is left to find out."""
        while self.others:
            if not await self._shorten():
                return False
            if self.others:
                self.needed.append(self.others.pop())
            if self.others:
                if self.num_runs == self._most:
                    return False
                if await self.differs(0):
                    self.others.clear()
        return True

    async def _shorten(self) -> bool:
        """Cut the others down to their shortest beginning with which answers differ; return whether it is that. If
        something is needed already, they do not differ without any of the others."""
        least = int(bool(self.needed))
        while least < len(self.others):
            if self.num_runs == self._most:
                return False
            middle = (least + len(self.others)) // 2
            if await self.differs(middle):
                del self.others[middle:]
            else:
                least = middle + 1
        return True


async def blame(settings: Sequence[str], differs: Differs, most: int = MOST_RUNS) -> Blame:
    """Return a smallest set of `settings` with which answers differ, as they do with all of them.

    `differs` runs the circumstance with some of them. The shortest differing beginning of the list ends with a setting
    that is needed; what is needed beside it is in front of it, and is found in the same way.
    """
    search = _Search(settings, differs, most)
    is_smallest = await search.run()
    found = {*search.others, *search.needed}
    return Blame(tuple(name for name in settings if name in found), is_smallest, search.num_runs)
