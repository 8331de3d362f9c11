"""Encoders of Qwen2-VL and Qwen2.5-VL: an image is one tile of any size. Those of the latter have windows."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.qwen import check_output_size
from forebay.families.config.vision.qwen2 import Qwen2Config
from forebay.layers.grid_encoder import (
    QUICK_GELU,
    SWIGLU,
    GridPatchesSpec,
    MergerSpec,
    RotaryBlockSpec,
    RotationSpec,
)
from forebay.models.encoders.grid import GridSpec


def encoder_spec(config: ModelConfig) -> GridSpec:
    """Describe the encoder of a Qwen2-VL or a Qwen2.5-VL. Raises ModelError if tokens are not of the model's width."""
    vision = config.vision
    assert isinstance(vision, Qwen2Config), f"{config.model_type} has no such encoder"
    check_output_size(vision, config.hidden_size, "out_hidden_size" if vision.gated else "hidden_size")
    return GridSpec(
        name="model.visual",
        patches=GridPatchesSpec(
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            depth=vision.depth,
            side=0,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        merger=MergerSpec(
            name="merger",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            output_size=vision.output_size,
            norm_eps=vision.norm_eps,
            rms=vision.gated,
            names=("ln_q", "mlp.0", "mlp.2"),
        ),
        window=vision.window * vision.merge,
        whole=vision.whole,
        rotation=RotationSpec(theta=vision.rope_theta, num_positions=vision.max_edge // vision.patch_size + 1),
    )


def _block(vision: Qwen2Config, layer: int) -> RotaryBlockSpec:
    return RotaryBlockSpec(
        name=f"blocks.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
        mlp=SWIGLU if vision.gated else QUICK_GELU,
        rms=vision.gated,
    )
