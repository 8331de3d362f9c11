"""Packed weights from the weights cache to the engine's memory, and into the cache after they were computed."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from forebay.base.errors import ModelError
from forebay.base.log import event, get_logger
from forebay.base.paths import cache_folder
from forebay.base.units import human_bytes
from forebay.config.engine_config import EngineConfig
from forebay.engine.lifecycle.contents import ContentsCheck
from forebay.formats import weights_cache
from forebay.formats.identity import weights_digest
from forebay.formats.quantization import Quantization
from forebay.formats.weights_cache import CacheFile, Key, Unusable
from forebay.formats.weights_turn import turn
from forebay.ops import Ops
from forebay.ops.weight_memory import OtherPieces
from forebay.pools.regions import Regions, Tag

Progress = Callable[[int, int], None]

# Smallest checkpoints that are cached. Below these sizes loading takes about a second, and a file is not worth that.
LEAST_BYTES: Final = {Quantization.INT8: 256 << 20, Quantization.INT4: 256 << 20, Quantization.FILE: 1 << 30}

# For an engine that computes the same file: reading takes at most a second for so many bytes of the checkpoint.
_LEAST_WAIT_S: Final = 600.0
_SLOWEST_BYTES: Final = 50_000_000

# Of the package: what decides on bytes and order of packed weights. A change of any file makes another key.
_DECIDES: Final = ("families", "formats", "layers", "models", "ops")

log = get_logger("engine")


class Mapped(NamedTuple):
    """A file of the cache in memory, and its pieces: views of it."""

    whole: Tensor
    pieces: Sequence[Tensor]


def cache_of_weights() -> Path:
    """Return the folder of the weights cache. It is not created here."""
    return cache_folder("weights")


def why_not_cached(config: EngineConfig, ops: Ops, checkpoint_bytes: int) -> str:
    """Return why a start neither reads nor writes the weights cache; "" if it does."""
    if config.ranks.size > 1:
        return "a rank packs its own part of the weights"
    if not config.weights_cache_bytes:
        return "--weights-cache-bytes 0"
    if ops.memory is None or config.device != "cpu":
        return f"the {ops.name} kernels pack weights in memory of their own"
    if config.quantization is Quantization.NONE:
        return f"weights in {config.types.dtype} are used as the checkpoint has them"
    if checkpoint_bytes < LEAST_BYTES[config.quantization]:
        return f"a checkpoint of {human_bytes(checkpoint_bytes)} is loaded about as fast without"
    return ""


class PackedCache:
    """The use that one start makes of the weights cache. `outcome` is a value and a reason for the start-up table."""

    def __init__(self, config: EngineConfig, ops: Ops, regions: Regions, folder: Path | None = None) -> None:
        self._config, self._ops, self._regions = config, ops, regions
        self._folder = folder or cache_of_weights()
        self._seen = 0  # inode of the file that `find` last looked at
        self.outcome = ("not used", "")
        self.contents: ContentsCheck | None = None  # of the file that is mapped

    def key(self, modified_ns: Sequence[int]) -> Key:
        """Return everything that packed weights depend on. `modified_ns` are the times of the checkpoint's files: they
        find what the samples of the digest miss, and a copy with other times is only computed once more."""
        config, draft = self._config, self._config.speculation.draft_model_path
        return {
            "checkpoint": weights_digest(Path(config.model_path)),
            "draft model": weights_digest(Path(draft)) if draft else "",
            "modification times": " ".join(map(str, modified_ns)),
            "speculation": str(config.speculation.algorithm),
            "quantization": str(config.quantization),
            "dtype": config.types.dtype,
            "kernels": self._ops.name,
            "activation bits": str(self._ops.activation_bits),
            "forebay": _program_digest(),
        }

    def find(self, key: Key, progress: Progress) -> Mapped | None:
        """Map the file with this key; None if there is none that can be used."""
        self._seen = weights_cache.inode_of(self._folder, key)
        file = None
        try:
            file = weights_cache.open_cached(self._folder, key)
            return None if file is None else self._mapped(key, file, progress)
        except (Unusable, OSError) as error:
            self.reject(key, error.message if isinstance(error, Unusable) else str(error))
            return None
        finally:
            if file is not None:
                os.close(file.descriptor)

    def _mapped(self, key: Key, file: CacheFile, progress: Progress) -> Mapped:
        whole = self._regions.take_file(Tag.WEIGHTS, file.descriptor, file.num_bytes, progress)
        try:
            if self._config.verify_weights_cache:
                file.check_contents(whole.numpy().data)
        except Unusable:
            self._regions.drop_file(Tag.WEIGHTS, whole)
            raise
        if self._config.verify_weights_cache:
            checked = "and its contents checked"
        else:
            checked = "its header checked, its contents behind the first answer"
            self.contents = ContentsCheck(file, weights_cache.path_of(self._folder, key))
        self.outcome = (f"mapped {human_bytes(file.num_bytes)}", f"shared with other engines, {checked}")
        return Mapped(whole, [whole[span] for span in file.spans()])

    @contextmanager
    def using(self, key: Key, mapped: Mapped) -> Iterator[None]:
        """Inside, the ops pack into the mapped pieces, which have their content. Raises OtherPieces, and rejects the
        file, if the loader packs others."""
        assert self._ops.memory is not None
        try:
            with self._ops.memory.holding(mapped.pieces):
                yield
        except OtherPieces as error:
            self._regions.drop_file(Tag.WEIGHTS, mapped.whole)
            self.contents = None
            self.reject(key, str(error))
            raise

    @contextmanager
    def turn(self, key: Key, checkpoint_bytes: int, held_bytes: int) -> Iterator[bool]:
        """Hold the turn of this key: other engines that start with it wait for this one, and this one waits for an
        earlier one. Yield whether the file is another than the one that `find` looked at. If `held_bytes` exceed the
        cache's size, no file will be written, and no engine waits."""
        if held_bytes > self._config.weights_cache_bytes:
            yield False
            return
        began, most_s = time.monotonic(), _LEAST_WAIT_S + checkpoint_bytes / _SLOWEST_BYTES
        waited = False

        def waiting(path: Path) -> None:
            nonlocal waited
            waited = True
            reason = "another engine computes the same weights: its file will be mapped"
            log.info(event("weights_cache_waits", path=path, reason=reason, at_most_s=most_s))

        with turn(self._folder, key, most_s=most_s, waiting=waiting) as had:
            if waited:
                log.info(event("weights_cache_waited", seconds=time.monotonic() - began, ended=had))
            yield weights_cache.inode_of(self._folder, key) not in (0, self._seen)

    def reject(self, key: Key, reason: str) -> None:
        """Log that the file with this key is ignored."""
        path = weights_cache.path_of(self._folder, key)
        effect = "the weights are computed from the checkpoint and the file is written again"
        log.warning(event("weights_cache_ignored", path=path, reason=reason, effect=effect))

    def write(self, key: Key, progress: Progress) -> None:
        """Write what the ops have packed. A failure is one log line: the engine serves without the file."""
        assert self._ops.memory is not None
        began = time.monotonic()
        pieces = [piece.numpy().data for piece in self._ops.memory.packed]
        limit = self._config.weights_cache_bytes
        try:
            path = weights_cache.write(self._folder, key, pieces, limit_bytes=limit, progress=progress)
        except (ModelError, OSError) as error:
            reason = error.message if isinstance(error, ModelError) else str(error)
            self.outcome = ("not written", reason)
            log.warning(event("weights_cache_not_written", folder=self._folder, reason=reason))
            return
        size = path.stat().st_size
        self.outcome = (f"written {human_bytes(size)}", "the next start maps them")
        log.info(event("weights_cache_written", path=path, size=human_bytes(size), seconds=time.monotonic() - began))


@functools.cache
def _program_digest() -> str:
    """Return the digest of the source files that decide on packed weights. All of them take 50 ms."""
    digest, package = hashlib.blake2b(digest_size=16), Path(__file__).parents[2]
    for folder in _DECIDES:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".bin"):
                digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
