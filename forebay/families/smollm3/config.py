from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.late_windows import NO_WINDOW, asks_for_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class SmolLM3Config(ModelConfig):
    """A configuration that says of each layer whether it has rotary embeddings."""

    has_rope: tuple[bool, ...]  # of each layer


def parse(fields: Fields) -> SmolLM3Config:
    """Read SmolLM3's fields: three layers of four have rotary embeddings by default; the others may have a window."""
    has_rope = _has_rope(fields)
    without = [layer for layer, there in enumerate(has_rope) if not there]
    windows = Windows(size=0, layers=lambda num_layers: without) if asks_for_windows(fields) else None
    values = transformer(fields, Defaults(rope_theta=2_000_000.0, tied=True, mlp_bias=True), windows=windows)
    return SmolLM3Config(**values, has_rope=has_rope)


def _has_rope(fields: Fields) -> tuple[bool, ...]:
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    interval = fields.size("no_rope_layer_interval", default=4)
    default = [int((i + 1) % interval != 0) for i in range(num_layers)]
    listed = fields.ints("no_rope_layers", default=default)
    if len(listed) < num_layers:
        raise fields.wrong("no_rope_layers", f"one entry for each of {num_layers} layers")
    return tuple(map(bool, listed[:num_layers]))


FAMILY: Final = Family(parse=parse, harmless=NO_WINDOW)
