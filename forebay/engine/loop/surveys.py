"""The prefix cache for viewers, a part for each question, so that no step waits for more than one part; and what more
memory would bring it."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np

from forebay.engine.frames import GetReuse, GetTree, ReuseReport, TreePart
from forebay.memory.kv_allocator import KV
from forebay.memory.pictures import Pictures
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Branch
from forebay.memory.radix_survey import survey
from forebay.scheduler.scheduler import Scheduler

NODES_PER_PART: Final = 128  # about a third of a millisecond
MAX_PARTS: Final = 512  # of a tree; the rest of a larger one is not shown
MAX_NOTES: Final = 4096  # seconds of work of which it is known what was used in them

_NOTHING: Final = iter(())


class Surveys:
    """One survey at a time. `note` is called about every second of work and when it ends: the cache itself has no time,
    so that this is how exactly it is known when something was used."""

    def __init__(self, cache: RadixCache, pictures: Pictures | None = None) -> None:
        self._cache, self._pictures = cache, pictures
        self._secret = secrets.token_bytes(32)
        self._survey: Iterator[Branch | None] = _NOTHING
        self._num_left = 0  # parts
        self._now = 0.0
        self._clocks: list[int] = []
        self._times: list[float] = []

    def note(self, now: float) -> None:
        """Keep the time at which the prefix cache's clock reached its value, so that ages can be given in seconds. At
        most `MAX_NOTES` are kept."""
        if not self._clocks or self._clocks[-1] < self._cache.clock:
            self._clocks.append(self._cache.clock)
            self._times.append(now)
        if len(self._clocks) > MAX_NOTES:
            del self._clocks[: MAX_NOTES // 2], self._times[: MAX_NOTES // 2]

    def part(self, wanted: GetTree, now: float) -> TreePart:
        """The next nodes of the tree, or its first ones."""
        self._now = now
        if wanted.begin:
            self._survey, self._num_left = survey(self._cache.index, self._secret, self._idle_s), MAX_PARTS
        passed = list(islice(self._survey, NODES_PER_PART))
        self._num_left -= 1
        is_whole = len(passed) < NODES_PER_PART
        if is_whole or not self._num_left:
            self._survey = _NOTHING
        branches = [self._as_tokens(branch) for branch in passed if branch]
        kinds = [kind.name for kind in self._cache.kinds]
        return TreePart(wanted.serial, branches, kinds, more=self._survey is not _NOTHING, is_cut=not is_whole)

    def _as_tokens(self, branch: Branch) -> Branch:
        """Return the branch with the model's placeholder for each of a picture's tokens."""
        if self._pictures is None:
            return branch
        tokens = self._pictures.as_tokens(np.frombuffer(branch.tokens, dtype=np.int32))
        return branch._replace(tokens=tokens.tobytes())

    def _idle_s(self, used: int) -> float:
        """Return how long ago a use was, at least; 0 for one since the last note."""
        at = bisect_left(self._clocks, used)
        return max(0.0, self._now - self._times[at]) if at < len(self._times) else 0.0


def of_cache(
    question: GetTree | GetReuse, surveys: Surveys, scheduler: Scheduler, now: float
) -> TreePart | ReuseReport:
    """Return the answer to a question about the prefix cache: the next part of its tree, or what more memory would
    bring it."""
    if isinstance(question, GetTree):
        return surveys.part(question, now)
    ghosts = scheduler.pools.ghosts
    if ghosts is None:
        return ReuseReport(question.serial, {}, {})
    page_bytes = scheduler.config.kinds.slot_bytes.get(KV, 0)
    tiers = {name: num_pages * page_bytes for name, num_pages in ghosts.tiers.items()}
    return ReuseReport(question.serial, tiers, ghosts.estimates())
