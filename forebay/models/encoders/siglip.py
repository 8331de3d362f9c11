"""SigLIP, with a connector behind it: blocks with biases and LayerNorms that attend within a whole tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.base import VisionConfig
from forebay.families.config.vision.siglip import SiglipConfig
from forebay.layers.encoder import (
    ConnectorSpec,
    EncoderBlockSpec,
    FlexPatchesSpec,
    PatchesSpec,
    PoolSpec,
    ProjectorSpec,
)
from forebay.layers.norms import LayerNormSpec, layer_norm_spec
from forebay.layers.params import Weights
from forebay.models.encoders.tile_encoder import TileEncoder
from forebay.ops import Ops

_VISION = "model.vision_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipSpec:
    """Patches, blocks, and behind the last one `norm` and the connector. `tokens` says how many a tile has."""

    patches: PatchesSpec | FlexPatchesSpec
    blocks: tuple[EncoderBlockSpec, ...]
    norm: LayerNormSpec
    norm_eps: float
    connector: ConnectorSpec | PoolSpec | ProjectorSpec
    tokens: str

    def build(self, ops: Ops, weights: Weights) -> TileEncoder:
        """Return the encoder with its weights."""
        return TileEncoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last = self.blocks[0], len(self.blocks) - 1
        yield self.patches.equation
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield "  x += attention(layernorm(x))"
        yield "  x += mlp(layernorm(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v + b  over all patches of a tile"
        yield f"    q = Wq h + b, k = Wk h + b, v = Wv h + b; {block.num_heads} heads of {block.head_dim}"
        yield f"  mlp(h) = Wd gelu(Wu h + b) + b  of {block.intermediate_size:,}"
        yield f"\nembedding[image] = {self.connector.equation}  ({self.tokens})"


def encoder_spec(config: ModelConfig) -> SiglipSpec:
    """Describe the encoder of a SmolVLM or Idefics 3."""
    vision = config.vision
    assert isinstance(vision, SiglipConfig), f"{config.model_type} has no such encoder"
    return SiglipSpec(
        patches=PatchesSpec(
            name=f"{_VISION}.embeddings",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=blocks_of(vision, _VISION),
        norm=layer_norm_spec(f"{_VISION}.post_layernorm", vision.hidden_size, bias=True),
        norm_eps=vision.norm_eps,
        connector=ConnectorSpec(
            name="model.connector.modality_projection.proj",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
        ),
        tokens=f"{vision.max_tokens:,} tokens a tile",
    )


def blocks_of(vision: VisionConfig, name: str) -> tuple[EncoderBlockSpec, ...]:
    """Describe the layers of an encoder whose part is called `name`."""
    return tuple(_block(vision, f"{name}.encoder.layers.{layer}") for layer in range(vision.num_layers))


def _block(vision: VisionConfig, name: str) -> EncoderBlockSpec:
    return EncoderBlockSpec(
        name=name,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
    )
