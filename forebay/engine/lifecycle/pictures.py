"""Sizes of the pictures of an engine, from its configuration and its encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.config.engine_config import EngineConfig
from forebay.config.pictures import PictureConfig
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.base import VisionConfig
from forebay.models.encoder import layer_costs
from forebay.models.encoders.encoder import Encoder

BLOCK_ROWS: Final = 64  # of encodings, where tiles differ in size


def picture_config(config: EngineConfig, model: ModelConfig, encoder: Encoder | None) -> PictureConfig | None:
    """Return what the scheduler must know of pictures, None for a model without an encoder. Encodings get half of the
    memory, in whole blocks, and pixels the rest."""
    if encoder is None or model.vision is None:
        return None
    sizes = sizes_of(model.vision, encoder, layer_costs(model), model.vocab_size, config.pictures.mm_cache_bytes)
    return replace(sizes, mrope=model.rope_sections is not None)


def sizes_of(
    vision: VisionConfig, encoder: Encoder, costs: tuple[float, float], vocab_size: int, cache_bytes: int
) -> PictureConfig:
    """Return the sizes of pictures with `cache_bytes`; `costs` are those of `layer_costs`."""
    token_cost, pair_cost = costs
    row_bytes = encoder.row_size * encoder.dtype.itemsize
    block_rows = vision.num_tokens(vision.tile_size) if vision.tile_size else BLOCK_ROWS
    return PictureConfig(
        num_layers=encoder.num_layers,
        token_edge=vision.token_edge,
        tile_size=vision.tile_size,
        max_edge=vision.max_edge,
        max_tokens=vision.max_tokens,
        token_cost=token_cost,
        pair_cost=pair_cost,
        block_rows=block_rows,
        num_rows=cache_bytes // 2 // (row_bytes * block_rows) * block_rows,
        row_bytes=row_bytes,
        cache_bytes=cache_bytes,
        vocab_size=vocab_size,
        placeholder=vision.placeholder,
        input_id=vision.input_id,
        seen_tokens=vision.seen_tokens,
        longest_span=vision.longest_span,
    )
