"""The encoder of Muse Glimmer."""

from __future__ import annotations

from typing import Final

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.muse_glimmer import BLOCK_EPS, MuseVisionConfig
from forebay.layers.grid_encoder import EXACT_GELU, BlockNames, RotaryBlockSpec, RotationSpec
from forebay.layers.muse_vision import MuseAdapterSpec, MusePatchesSpec
from forebay.models.encoders.grid import GridSpec

_TOWER: Final = "vision_tower"
_NAMES: Final = BlockNames(qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"))


def encoder_spec(config: ModelConfig) -> GridSpec:
    """Describe the encoder of a Muse Glimmer."""
    vision = config.vision
    assert isinstance(vision, MuseVisionConfig), f"{config.model_type} has no such encoder"
    return GridSpec(
        name="model",
        patches=MusePatchesSpec(
            name=f"{_TOWER}.patch_embedder",
            norm=f"{_TOWER}.ln_pre",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            depth=vision.depth,
            side=vision.side,
            norm_eps=vision.norm_eps,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        merger=MuseAdapterSpec(
            norm=f"{_TOWER}.ln_post",
            adapter="vision_adapter",
            projection="vision_projection",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            inner_size=vision.projector_size,
            output_size=config.hidden_size,
            norm_eps=vision.norm_eps,
            output_eps=config.rms_norm_eps,
        ),
        window=vision.side,
        whole=vision.whole,
        rotation=RotationSpec(
            theta=vision.theta,
            num_positions=vision.max_edge // vision.patch_size,
            columns_first=True,
            first=1,
        ),
    )


def _block(vision: MuseVisionConfig, layer: int) -> RotaryBlockSpec:
    return RotaryBlockSpec(
        name=f"{_TOWER}.layers.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=BLOCK_EPS,
        mlp=EXACT_GELU,
        names=_NAMES,
    )
