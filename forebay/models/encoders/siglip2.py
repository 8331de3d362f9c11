"""SigLIP 2 for tiles of any ratio, with an MLP behind it: the encoder of LFM2-VL."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.siglip2 import Siglip2Config
from forebay.layers.encoder import FlexPatchesSpec, ProjectorSpec
from forebay.layers.norms import layer_norm_spec
from forebay.models.encoders.siglip import SiglipSpec, blocks_of

_VISION = "model.vision_tower"


def encoder_spec(config: ModelConfig) -> SiglipSpec:
    """Describe the encoder of an LFM2-VL."""
    vision = config.vision
    assert isinstance(vision, Siglip2Config), f"{config.model_type} has no such encoder"
    return SiglipSpec(
        patches=FlexPatchesSpec(
            name=f"{_VISION}.embeddings",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.position_side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=blocks_of(vision, _VISION),
        norm=layer_norm_spec(f"{_VISION}.post_layernorm", vision.hidden_size, bias=True),
        norm_eps=vision.norm_eps,
        connector=ProjectorSpec(
            name="model.multi_modal_projector",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            inner_size=vision.projector_size,
            output_size=config.hidden_size,
            norm=vision.projector_norm,
            bias=vision.projector_bias,
        ),
        tokens=f"a token for {vision.token_edge} x {vision.token_edge} pixels",
    )
