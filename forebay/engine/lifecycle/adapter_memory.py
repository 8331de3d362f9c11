"""The slots of adapters in the weights of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch

from forebay.engine.lifecycle.adapters import AdapterMemory, ReadAdapter
from forebay.families.config.model_config import ModelConfig
from forebay.layers.adapters import Adapters, PackedAdapter
from forebay.models import adapter_of

_DONE: Final = object()


class ModelAdapters(AdapterMemory):
    """An `AdapterMemory` over the tables of a model of this configuration."""

    def __init__(self, adapters: Adapters, config: ModelConfig) -> None:
        self._adapters, self._config, self._layers = adapters, config, dict(adapters.layers)

    def read(self, path: str) -> PackedAdapter:
        slots = self._adapters.slots
        files = adapter_of(Path(path), self._config, layers=self._layers, max_rank=slots.max_rank)
        # Between a prefill and a decode server the digest stands for what is computed, so the rounding is part of it.
        files = replace(files, digest=sha256(f"{files.digest} {slots.dtype}".encode()).hexdigest())
        with torch.inference_mode():
            return self._adapters.pack(files)

    def holds(self, slot: int) -> bool:
        return self._adapters.holds(slot)

    def write(self, slot: int, files: ReadAdapter) -> Iterator[None]:
        assert isinstance(files, PackedAdapter), files
        copies = self._adapters.write(slot, files)
        while True:
            with torch.inference_mode():  # not beyond the yield
                if next(copies, _DONE) is _DONE:
                    return
            yield
