"""Sizes of the pictures of an engine, from its configuration and its encoder."""

from __future__ import annotations

from forebay.config.engine_config import EngineConfig
from forebay.config.pictures import PictureConfig
from forebay.families.model_config import ModelConfig
from forebay.models.encoder import Encoder, layer_tokens


def picture_config(config: EngineConfig, model: ModelConfig, encoder: Encoder | None) -> PictureConfig | None:
    """Return what the scheduler must know of pictures, None for a model without an encoder. Encodings get half of the
    memory, in whole tiles, and pixels the rest."""
    if encoder is None or model.vision is None:
        return None
    row_bytes, per_tile = encoder.hidden_size * encoder.dtype.itemsize, encoder.tokens_per_tile
    cache_bytes = config.pictures.mm_cache_bytes
    return PictureConfig(
        num_layers=encoder.num_layers,
        layer_tokens=layer_tokens(model),
        tokens_per_tile=per_tile,
        tile_bytes=3 * model.vision.image_size**2,
        num_rows=cache_bytes // 2 // (row_bytes * per_tile) * per_tile,
        row_bytes=row_bytes,
        cache_bytes=cache_bytes,
        vocab_size=model.vocab_size,
        placeholder=model.vision.placeholder,
    )
