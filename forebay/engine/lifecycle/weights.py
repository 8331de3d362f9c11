"""The weights that an engine has loaded, and how the same or other weights are loaded again into their places."""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from forebay.backends import kernels_on
from forebay.base import fault
from forebay.base.cpu import this_cpu
from forebay.base.errors import Conflict, InvalidRequest, ModelError
from forebay.base.log import event, get_logger
from forebay.config.engine_config import EngineConfig
from forebay.config.rules import value_bytes
from forebay.engine.lifecycle.drafting import assistant_of, draft_model_of, drafter_of
from forebay.engine.lifecycle.packed_cache import PackedCache, why_not_cached
from forebay.families.base.embedding import dense_files, token_files
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.formats.files import open_regular
from forebay.formats.gguf_parts import model_file, part_paths
from forebay.formats.safetensors import checkpoint_files
from forebay.formats.store import hold
from forebay.formats.stored_tensor import StoredTensor
from forebay.formats.weights_cache import Key
from forebay.models import AdapterSlots, describe, load
from forebay.models.assistant import Assistant
from forebay.models.drafter import Drafter
from forebay.models.encoder import load_encoder
from forebay.models.encoders.encoder import Encoder
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.ops.exchange import WHOLE, Share
from forebay.ops.weight_memory import OtherPieces

DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HEADER_BYTES: Final = 1 << 20  # of a file's beginning, where the names and shapes of its tensors are
_SHOWN: Final = 5
_STORAGE: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

Progress = Callable[[int, int], None]

log = get_logger("engine")


class Loaded(NamedTuple):
    """The models of one engine; those that it does not use are None."""

    model: Network
    draft_model: Network | None
    assistant: Assistant | None
    drafter: Drafter | None
    encoder: Encoder | None


class Seen(NamedTuple):
    """A file as it was."""

    path: Path
    size: int
    modified_ns: int
    header: str  # hash

    @classmethod
    def of(cls, path: Path) -> Seen:
        """Read the identity of the file at `path`: size, modification time and a hash of its beginning."""
        with open_regular(path) as file:
            status = path.stat()
            return cls(path, status.st_size, status.st_mtime_ns, hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest())


def weight_paths(path: Path) -> list[Path]:
    """Return the files of weights of the model at `path`. Raises ModelError if one of safetensors is missing."""
    path = model_file(path)
    if path.suffix == ".gguf":
        return part_paths(path)
    return [*checkpoint_files(path), *dense_files(path), *token_files(path)]


class EngineWeights:
    """The model and its drafter. A second load uses the same addresses: graphs recorded over the weights stay valid.

    `given` are tensors that came from no file, by the checkpoint's names.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        cache: PackedCache,
        *,
        num_positions: int,
        share: Share = WHOLE,
    ) -> None:
        self._config, self._ops, self._num_positions = config, ops, num_positions
        self._path, self._given = Path(config.model_path), dict[str, StoredTensor]()
        self._numbers: Sequence[float] = ()
        self._cache, self._share = cache, share
        self._unwritten = False  # packed weights are those of the mapped cache file
        self.num_bytes = 0
        self._layout = _layout(checkpoint)
        self._spec = describe(checkpoint.config, draft_head=self._draft_head)
        self._files = self._seen(self._path)
        weakref.finalize(self, os.close, hold(self._path))

    @property
    def _draft_head(self) -> bool:
        return self._config.speculation.by_own_head

    def load(self, checkpoint: Checkpoint, progress: Callable[[], Progress], writing: Callable[[], Progress]) -> Loaded:
        """For the first time: from the weights cache, or from the checkpoint and then into the cache, of which
        `writing` makes the progress."""
        size = sum(seen.size for seen in self._files)
        why = why_not_cached(self._config, self._ops, size)
        self._cache.outcome = ("not used", why)
        if why:
            loaded = self._computed(checkpoint, progress)
        else:
            key = self._cache.key([seen.modified_ns for seen in self._files])
            loaded = self._from_cache(key, checkpoint, progress()) or self._in_turn(key, checkpoint, progress, writing)
        self._numbers = loaded.model.numbers
        held = (loaded.model, loaded.draft_model, loaded.encoder)
        self.num_bytes = sum(part.weight_bytes for part in held if part is not None)
        return loaded

    def _in_turn(
        self, key: Key, checkpoint: Checkpoint, progress: Callable[[], Progress], writing: Callable[[], Progress]
    ) -> Loaded:
        """Compute the weights and write them into the cache, unless another engine has done so meanwhile."""
        values = value_bytes(self._config.types.dtype, kernels_on(this_cpu(), self._config.kernels))
        held_bytes = checkpoint.weight_shapes().held_bytes(self._config.quantization, values)
        with self._cache.turn(key, sum(seen.size for seen in self._files), held_bytes) as written:
            if not written:
                loaded = self._computed(checkpoint, progress)
                self._cache.write(key, writing())
                return loaded
        return self._from_cache(key, checkpoint, progress()) or self._computed(checkpoint, progress)

    def _computed(self, checkpoint: Checkpoint, progress: Callable[[], Progress]) -> Loaded:
        loaded = self._build(checkpoint, progress)
        self._check_unchanged()
        return loaded

    def _check_unchanged(self) -> None:
        if changed := self._changed(self._seen(self._path), self._files):
            raise ModelError(f"{changed} changed while the weights were loaded: start again when nothing writes there")

    def _from_cache(self, key: Key, checkpoint: Checkpoint, progress: Progress) -> Loaded | None:
        """Load with the packed weights of the cache; None if it has none that fit."""
        mapped = self._cache.find(key, progress)
        if mapped is None:
            return None
        try:
            with self._cache.using(key, mapped):
                loaded = self._build(checkpoint, lambda: _silent)
        except OtherPieces:
            return None
        self._check_unchanged()
        self._unwritten = True
        return loaded

    def _build(self, checkpoint: Checkpoint, progress: Callable[[], Progress]) -> Loaded:
        config, ops = self._config, self._ops
        model = load(
            checkpoint,
            ops=ops,
            dtype=DTYPES[config.types.dtype],
            device=config.device,
            progress=progress(),
            context_length=self._num_positions,
            quantization=config.quantization,
            draft_head=self._draft_head,
            adapters=adapter_slots(config),
            share=self._share,
        )
        count, shown = self._num_positions, progress()
        return Loaded(
            model,
            draft_model_of(config, model, ops, num_positions=count, progress=shown),
            assistant_of(config, checkpoint.config, ops, dtype=model.dtype, num_positions=count, progress=shown),
            drafter_of(config, checkpoint.config, model, ops, num_positions=count, progress=shown),
            self._encoder(checkpoint, progress),
        )

    def _encoder(self, checkpoint: Checkpoint, progress: Callable[[], Progress]) -> Encoder | None:
        if checkpoint.config.vision is None:
            return None
        dtype, device = DTYPES[self._config.types.dtype], self._config.device
        return load_encoder(checkpoint, ops=self._ops, dtype=dtype, device=device, progress=progress())

    def check_there(self) -> None:
        """Raise Conflict where they could not be loaded again: the files must be those that were loaded."""
        if self._ops.memory is None:
            raise Conflict(
                f"weights of the {self._ops.name} kernels stay where and what they are", code="not_releasable"
            )
        try:
            changed = self._changed(self._seen(self._path), self._files)
        except (ModelError, OSError, ValueError) as error:
            raise Conflict(f"the weights cannot be read again: {error}", code="weights_gone") from error
        if changed:
            raise Conflict(f"{changed} changed since the weights were loaded: restart", code="weights_gone")

    @staticmethod
    def _changed(here: Sequence[Seen], before: Sequence[Seen]) -> str:
        return ", ".join(sorted({str(seen.path) for seen in set(here) ^ set(before)}))

    def _seen(self, path: Path) -> list[Seen]:
        """The files of the model at `path`, of its encoder, and of the draft model."""
        others = (self._config.pictures.mmproj, self._config.speculation.draft_model_path)
        paths = [path, *(Path(other) for other in others if other is not None)]
        return [Seen.of(file) for path in paths for file in weight_paths(path)]

    def load_again(self, progress: Callable[[], None]) -> None:
        """Load the same files again. Raises Conflict if the files have changed; the weights in memory are then invalid.
        `progress` is called with each tensor."""
        self.check_there()
        self._place(self._checkpoint(self._path, self._given), progress, filled=self._unwritten)
        self.check_there()

    def update(self, path: Path | None, given: Mapping[str, StoredTensor], progress: Callable[[], None]) -> None:
        """Load the weights of the checkpoint at `path` (None: the loaded one), with `given` tensors instead of some of
        them. Raises InvalidRequest or Conflict, and changes nothing, if names, shapes or formats differ. After any
        other error the old weights are loaded again, or UpdateLost is raised."""
        self.check_there()
        files = self._seen(path or self._path)
        checkpoint = self._checkpoint(path or self._path, given if path else {**self._given, **given})
        self._check(checkpoint)
        self._unwritten = False
        try:
            self._place(checkpoint, progress)
            if changed := self._changed(self._seen(checkpoint.path), files):
                raise ModelError(f"{changed} changed while the weights were loaded: try again when it is complete")
        except Exception as error:
            self._restore(error, progress)
            raise
        self._path, self._given = checkpoint.path, dict(given if path else {**self._given, **given})
        self._files = files

    def _restore(self, error: Exception, progress: Callable[[], None]) -> None:
        log.error(event("update_failed", reason=str(error), effect="the old weights are read again"))
        try:
            self.load_again(progress)
        except Exception as gone:
            raise UpdateLost(f"{error}; and the old weights cannot be had again: {gone}") from gone

    def _checkpoint(self, path: Path, given: Mapping[str, StoredTensor]) -> Checkpoint:
        found = open_checkpoint(path, draft_head=self._draft_head, mmproj=self._config.pictures.mmproj)
        return replace(found, tensors={**found.tensors, **given}) if given else found

    def _check(self, checkpoint: Checkpoint) -> None:
        layout = _layout(checkpoint)
        wrong = [
            f"{name} is {_described(layout.get(name))} instead of {_described(self._layout.get(name))}"
            for name in sorted(layout.keys() | self._layout.keys())
            if layout.get(name) != self._layout.get(name)
        ]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise InvalidRequest(
                f"{checkpoint.path}: {len(wrong)} weights are others than are loaded: {', '.join(wrong[:_SHOWN])}{more}"
            )
        if describe(checkpoint.config, draft_head=self._draft_head) != self._spec:
            raise InvalidRequest(f"{checkpoint.path}: its configuration describes another model than is loaded")

    def _place(self, checkpoint: Checkpoint, progress: Callable[[], None], *, filled: bool = False) -> None:
        def loaded(done: int, total: int) -> None:
            progress()
            fault.point("engine.load_again")

        assert self._ops.memory is not None, "weights in memory that is not had again"
        with torch.inference_mode(), self._ops.memory.again(filled=filled):
            again = self._build(checkpoint, lambda: loaded)
        if again.model.numbers != self._numbers:
            raise InvalidRequest(
                f"{checkpoint.path}: weights that are single numbers differ, {again.model.numbers} instead of "
                f"{self._numbers}: recorded steps have the old ones, so restart with these"
            )


def adapter_slots(config: EngineConfig) -> AdapterSlots | None:
    """Return the room for adapters; None if none is served. They are rounded to bfloat16 unless the model computes in
    float32 by choice, as the KV cache is."""
    options = config.adapters
    if not options.enabled:
        return None
    dtype = torch.float32 if config.types.kv_cache_dtype == "float32" else torch.bfloat16
    return AdapterSlots(max_loras=options.max_loras, max_rank=options.max_lora_rank, dtype=dtype)


def _silent(done: int, total: int) -> None:
    return


class GivenTensor:
    """A `StoredTensor` that is in memory, a copy: bfloat16, float16 or float32."""

    codes = None

    def __init__(self, tensor: Tensor) -> None:
        if tensor.dtype not in _STORAGE:
            raise InvalidRequest(f"a tensor of {tensor.dtype}: give bfloat16, float16 or float32")
        self.shape, self.storage = tuple(tensor.shape), _STORAGE[tensor.dtype]
        self.bfloat16 = tensor.dtype == torch.bfloat16
        values = tensor.detach().cpu().contiguous().clone()
        self._values: npt.NDArray[Any] = (values.view(torch.uint16) if self.bfloat16 else values).numpy()
        self.num_bytes = self._values.nbytes

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the whole tensor as one matrix [rows, last dimension]."""
        yield self._values.reshape(math.prod(self.shape[:-1]), -1) if self._values.size else self._values.reshape(0, 0)


class UpdateLost(Conflict):
    """Neither the new weights nor the old ones could be loaded."""

    default_code = "weights_lost"


Layout = dict[str, tuple[tuple[int, ...], str]]


def _layout(checkpoint: Checkpoint) -> Layout:
    """By name the shape and how the values are stored."""
    return {name: (tensor.shape, tensor.storage) for name, tensor in checkpoint.tensors.items()}


def _described(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "not there" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
