"""SigLIP, with a connector behind it: blocks with biases and LayerNorms that attend within a whole tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from forebay.families.model_config import ModelConfig
from forebay.families.vision.base import VisionConfig
from forebay.families.vision.siglip import SiglipConfig
from forebay.layers.build import Parts
from forebay.layers.encoder import (
    MOST_SIZES,
    ConnectorSpec,
    EncoderBlockSpec,
    FlexPatchesSpec,
    PatchesSpec,
    PoolSpec,
    ProjectorSpec,
)
from forebay.layers.norms import LayerNormSpec, build_norm, layer_norm_spec
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments

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

    def build(self, ops: Ops, weights: Weights) -> SiglipEncoder:
        """Return the encoder with its weights."""
        return SiglipEncoder(self, ops, weights)

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


class SiglipEncoder(Encoder):
    """The patches of a tile attend to each other; a tile's bits depend on its pixels alone."""

    def __init__(self, spec: SiglipSpec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.connector.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._norm = build_norm(spec.norm, parts, spec.norm_eps)
        self._connector = spec.connector.build(parts)
        assert not parts.kept, "an encoder keeps nothing"
        self._size, self._device = spec.patches.size, weights.device
        self._tile = lru_cache(MOST_SIZES)(self._tile_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        height, width, _ = pixels.shape
        return State(self._patches(pixels), (height // self._size, width // self._size))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, tile = state.x, self._tile(len(state.x))
        for block in self._blocks[first:last]:
            x = block(x, tile)
        return State(x, state.grid)

    def _tile_of(self, num_patches: int) -> PagedKv:
        return segments([num_patches], self._device)

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, H]."""
        return self._connector(self._norm.of(state.x), state.grid)


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
