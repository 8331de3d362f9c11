"""The encoder of Kimi K2.5, under the names of its published files below `model`."""

from __future__ import annotations

from typing import Final

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.kimi_k25 import KimiVisionConfig
from forebay.layers.grid_encoder import GELU, BlockNames, MergerSpec, RotaryBlockSpec, RotationSpec
from forebay.layers.moon_vit import MoonPatchesSpec, MoonProjectorSpec
from forebay.models.encoders.grid import GridSpec

_TOWER: Final = "vision_tower"
_NAMES: Final = BlockNames(norms=("norm0", "norm1"), qkv=("wqkv",), out="wo")
_MLP: Final = GELU._replace(up=("fc0",), down="fc1")


def encoder_spec(config: ModelConfig) -> GridSpec:
    """Describe the encoder of a Kimi K2.5."""
    vision = config.vision
    assert isinstance(vision, KimiVisionConfig), f"{config.model_type} has no such encoder"
    return GridSpec(
        name="model",
        patches=MoonPatchesSpec(
            name=f"{_TOWER}.patch_embed",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        merger=MoonProjectorSpec(
            norm=f"{_TOWER}.encoder.final_layernorm",
            norm_eps=vision.norm_eps,
            merger=MergerSpec(
                name="mm_projector",
                factor=vision.merge,
                hidden_size=vision.hidden_size,
                output_size=config.hidden_size,
                norm_eps=vision.projector_eps,
                names=("pre_norm", "proj.0", "proj.2"),
            ),
        ),
        window=vision.max_edge,
        whole=frozenset(range(vision.num_layers)),
        rotation=RotationSpec(
            theta=vision.theta,
            num_positions=vision.max_edge // vision.patch_size,
            columns_first=True,
            by_turns=True,
        ),
    )


def _block(vision: KimiVisionConfig, layer: int) -> RotaryBlockSpec:
    return RotaryBlockSpec(
        name=f"{_TOWER}.encoder.blocks.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
        mlp=_MLP,
        names=_NAMES,
        neighbours=True,
    )
