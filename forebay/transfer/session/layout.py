"""Layout of this engine: the properties that two engines must share before one reads what the other computed (C31)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from forebay.config.engine_config import EngineConfig
from forebay.families.config.model_config import processor_files
from forebay.formats.identity import weights_digest
from forebay.memory.kinds.build import has_pages
from forebay.pools.cache_pool import CachePool
from forebay.transfer.wire.frames import Layout

_LINE_CHARS: Final = 256


def layout_of(cache: CachePool, config: EngineConfig, *, vocab_size: int, kernels: str) -> Layout:
    """Return the layout: `kernels` is the name of the variant that computes; the rest comes from the configuration."""
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
        pictures=picture_lines(Path(config.model_path), config.pictures.mmproj),
    )


def columns_of(cache: CachePool) -> Iterator[str]:
    """`kv 3.k: 8 x 64 bfloat16`, one line for each, in the order in which regions are counted."""
    for kind, table in cache.tables.items():
        for name, column in table.columns.items():
            shape = column.shape[1:] if has_pages(kind) else column.shape
            yield f"{kind} {name}: {' x '.join(map(str, shape)) or '1'} {str(column.dtype).removeprefix('torch.')}"


def picture_lines(model: Path, mmproj: str | None) -> list[str]:
    """Return `size.longest_edge: 512`, one line for each number of the model's image processor, and for a GGUF model
    the digest of its encoder's file `mmproj`. Servers that differ here make unlike numbers of tokens of one picture.
    Raises ModelError for a processor's file that cannot be read."""
    if mmproj is not None:
        return [f"mmproj: {weights_digest(Path(mmproj))}"]
    if not model.is_dir():
        return []
    files = processor_files(model)
    around = {name: value for name, value in files.around.items() if not isinstance(value, dict)}
    return sorted(line[:_LINE_CHARS] for line in _numbers("", {**around, **files.own}))


def _numbers(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, int | float):
        yield f"{prefix.removesuffix('.')}: {value}"
    elif isinstance(value, list | dict):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{prefix}{name}.", inner)
