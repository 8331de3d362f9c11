"""Qwen3-VL's encoder: an image is one tile of any size, and some layers leave features for the language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.qwen import check_output_size
from forebay.families.config.vision.qwen3 import Qwen3Config
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.grid_encoder import GridPatchesSpec, MergerSpec, RotaryBlockSpec, Rotations, RotationSpec
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments

_VISION = "model.visual"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Spec:
    """Patches, blocks, and behind the last one the merger. `features` are the mergers behind the layers `deepstack`."""

    patches: GridPatchesSpec
    blocks: tuple[RotaryBlockSpec, ...]
    merger: MergerSpec
    deepstack: tuple[int, ...]
    features: tuple[MergerSpec, ...]
    rotation: RotationSpec

    def build(self, ops: Ops, weights: Weights) -> Qwen3Encoder:
        """Return the encoder with its weights."""
        return Qwen3Encoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last = self.blocks[0], len(self.blocks) - 1
        side, factor = self.patches.side, self.merger.factor
        yield self.patches.equation
        yield f"  position: {side} x {side} learned ones, interpolated to the rows and columns of the image"
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield "  x += attention(layernorm(x))"
        yield "  x += mlp(layernorm(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v + b  over all patches of an image"
        yield f"    q = R(Wq h + b), k = R(Wk h + b), v = Wv h + b; {block.num_heads} heads of {block.head_dim}"
        yield f"    R: rotation by row and column, base {self.rotation.theta:g}"
        yield f"  mlp(h) = Wd {block.mlp.equation} + b  of {block.intermediate_size:,}"
        squares = f"x of {factor} x {factor} patches"
        yield f"\nembedding[image] = W2 gelu(W1 layernorm({squares}) + b) + b"
        for number, layer in enumerate(self.deepstack):
            yield f"feature {number}[image] = the same of layer {layer}'s x, added behind layer {number} of the decoder"


class Qwen3Encoder(Encoder):
    """The patches of an image attend to each other; its bits depend on its pixels alone."""

    def __init__(self, spec: Qwen3Spec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.merger.output_size * (1 + len(spec.features)))
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory)).within(_VISION)
        self._ops, self._deepstack, self._device = ops, spec.deepstack, weights.device
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._merger = spec.merger.build(parts)
        self._features = [merger.build(parts) for merger in spec.features]
        self._rotations = Rotations(spec.rotation, spec.blocks[0].head_dim, weights.device)
        self._tile = lru_cache(MOST_SIZES)(self._tile_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        return State(*self._patches(pixels))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, grid, features = state
        tile, by = self._tile(len(x)), self._rotations.of(grid)
        for layer, block in enumerate(self._blocks[first:last], first):
            x = block(x, tile, by)
            if layer in self._deepstack:
                merger = self._features[self._deepstack.index(layer)]
                features = (*features, merger(x, grid))
        return State(x, grid, features)

    def _tile_of(self, num_patches: int) -> PagedKv:
        return segments([num_patches], self._device)

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, row_size], row by row of the tile."""
        return torch.cat([self._merger(state.x, state.grid), *state.features], dim=1)


def encoder_spec(config: ModelConfig) -> Qwen3Spec:
    """Describe the encoder of a Qwen3-VL. Raises ModelError for one whose tokens are not of the model's width."""
    vision = config.vision
    assert isinstance(vision, Qwen3Config), f"{config.model_type} has no such encoder"
    check_output_size(vision, config.hidden_size)
    mergers = [_merger(vision, "merger")]
    mergers += [_merger(vision, f"deepstack_merger_list.{i}", norm_merged=True) for i in range(len(vision.deepstack))]
    return Qwen3Spec(
        patches=GridPatchesSpec(
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            depth=vision.depth,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        merger=mergers[0],
        deepstack=vision.deepstack,
        features=tuple(mergers[1:]),
        rotation=RotationSpec(theta=vision.rope_theta, num_positions=vision.max_edge // vision.patch_size + 1),
    )


def _merger(vision: Qwen3Config, name: str, *, norm_merged: bool = False) -> MergerSpec:
    return MergerSpec(
        name=name,
        factor=vision.merge,
        hidden_size=vision.hidden_size,
        output_size=vision.output_size,
        norm_eps=vision.norm_eps,
        norm_merged=norm_merged,
    )


def _block(vision: Qwen3Config, layer: int) -> RotaryBlockSpec:
    return RotaryBlockSpec(
        name=f"blocks.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
    )
