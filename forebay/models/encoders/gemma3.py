"""Gemma 3's encoder: SigLIP, and behind it averages of squares of patches, a norm and a projection."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from forebay.layers.encoder import PatchesSpec, PoolSpec
from forebay.layers.norms import layer_norm_spec
from forebay.models.encoders.siglip import SiglipSpec, blocks_of

_TOWER = "model.vision_tower"


def encoder_spec(config: ModelConfig) -> SiglipSpec:
    """Describe the encoder of a Gemma 3."""
    vision = config.vision
    assert isinstance(vision, PooledSiglipConfig), f"{config.model_type} has no such encoder"
    return SiglipSpec(
        patches=PatchesSpec(
            name=f"{_TOWER}.embeddings",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
            by_fraction=False,
        ),
        blocks=blocks_of(vision, _TOWER),
        norm=layer_norm_spec(f"{_TOWER}.post_layernorm", vision.hidden_size, bias=True),
        norm_eps=vision.norm_eps,
        connector=PoolSpec(
            name="model.multi_modal_projector",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
            norm_eps=vision.norm_eps,
        ),
        tokens=f"{vision.max_tokens:,} tokens a tile",
    )
