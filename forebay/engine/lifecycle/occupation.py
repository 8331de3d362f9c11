"""The memory that an engine occupies, by tag: given back, and taken again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from forebay.base.errors import Conflict
from forebay.engine.lifecycle.sleep import Memory
from forebay.engine.lifecycle.weights import EngineWeights
from forebay.formats.stored_tensor import StoredTensor
from forebay.memory.slots import Ids
from forebay.pools.mover import Places, Rows, num_bytes
from forebay.pools.regions import Regions, Tag
from forebay.runtime import ModelRunner


class Occupation(Memory):
    """An `engine.sleep.Memory` of a real engine. Nothing may be in flight in any call of it.

    `trim` gives back what else the process keeps free.
    """

    def __init__(
        self, regions: Regions, runner: ModelRunner, weights: EngineWeights, *, trim: Callable[[], None]
    ) -> None:
        self._regions, self._runner, self._weights, self._trim = regions, runner, weights, trim
        self._kept: tuple[Rows, Places] | None = None  # of the caches, while they are released

    def num_bytes(self) -> dict[str, int]:
        own: dict[str, int] = {tag: self._regions.num_bytes(tag) for tag in Tag}
        return own | {Tag.WEIGHTS: own[Tag.WEIGHTS] or self._weights.num_bytes}

    def check(self, tags: Collection[str]) -> None:
        for tag in map(Tag, tags):
            if why := self._regions.why_kept(tag):
                raise Conflict(f"{tag} cannot be released: {why}", code="not_releasable")
        if self._loads(tags):
            self._weights.check_there()

    def _loads(self, tags: Collection[str]) -> bool:
        """Return whether weights are read again, as of no others there is a copy."""
        return Tag.WEIGHTS in tags and Tag.WEIGHTS not in self._regions.backed_up

    def keep(self, places: Mapping[str, Ids]) -> int:
        at = self._runner.mover.places(places)
        rows = self._runner.mover.read(at)
        self._runner.mover.wait()
        self._kept = rows, at
        return num_bytes(rows)

    def release(self, tags: Collection[str]) -> None:
        if Tag.CUDA_GRAPH in tags and not self._regions.num_bytes(Tag.CUDA_GRAPH):
            self._runner.drop_graphs()  # what they compute in is theirs
        for tag in map(Tag, tags):
            self._regions.release(tag)
        self._trim()

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        try:
            for tag in map(Tag, tags):
                self._regions.resume(tag)
            if Tag.KV_CACHE in tags:
                self._runner.rows.reset()
                self._runner.cache.reset()
                if self._runner.encodings is not None:
                    self._runner.encodings.reset()
                if self._kept:
                    self._runner.mover.write(*self._kept)
            if self._loads(tags):
                self._weights.load_again(progress)
                self._trim()
        except BaseException:
            self.release(tags)
            raise
        if Tag.KV_CACHE in tags:
            self._kept = None

    def update(self, path: str | None, given: Mapping[str, StoredTensor], progress: Callable[[], None]) -> None:
        self._weights.update(None if path is None else Path(path), given, progress)
        self._kept = None
