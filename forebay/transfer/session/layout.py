"""Layout of this engine: the properties that two engines must share before one reads what the other computed (C31)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forebay.config.engine_config import EngineConfig
from forebay.formats.gguf_parts import model_file, part_paths
from forebay.memory.kinds.build import has_pages
from forebay.pools.cache_pool import CachePool
from forebay.transfer.wire.frames import Layout

_HEAD_BYTES: Final = 64 << 10
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4 << 10


def layout_of(cache: CachePool, config: EngineConfig, *, vocab_size: int, kernels: str) -> Layout:
    """`kernels` is the name of the variant that computes; the rest stands in the configuration."""
    draft = config.speculation.draft_model_path if config.speculation.algorithm.keeps_kv else None
    return Layout(
        page_size=cache.page_size,
        vocab_size=vocab_size,
        weights=weights_digest(Path(config.model_path)),
        draft_weights=weights_digest(Path(draft)) if draft else "",
        quantization=str(config.quantization),
        dtype=config.types.dtype,
        kernels=kernels,
        activation_bits=config.activation_bits,
        columns=list(columns_of(cache)),
    )


def columns_of(cache: CachePool) -> Iterator[str]:
    """`kv 3.k: 8 x 64 bfloat16`, one line for each, in the order in which regions are counted."""
    for kind, table in cache.tables.items():
        for name, column in table.columns.items():
            shape = column.shape[1:] if has_pages(kind) else column.shape
            yield f"{kind} {name}: {' x '.join(map(str, shape)) or '1'} {str(column.dtype).removeprefix('torch.')}"


def weights_digest(path: Path) -> str:
    """Return the digest of a checkpoint: its configuration, and of each weight file the size, the header and samples.
    Two trainings of one architecture have the same header, and reading all would take as long as loading."""
    digest = hashlib.blake2b(digest_size=16)
    path = model_file(path)
    files = part_paths(path) if path.is_file() else sorted((*path.glob("config.json"), *path.glob("*.safetensors")))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_HEAD_BYTES))
            for i in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))  # the last one ends with the file
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
