"""Gemma 4's encoder: an image is one tile of any size, whose patches are rotated by row and column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from torch import Tensor

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.gemma4 import Gemma4VisionConfig
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.gemma4_encoder import AveragesSpec, AxisPatchesSpec, Gemma4BlockSpec
from forebay.layers.grid_encoder import Rotations, RotationSpec
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments

_TOWER: Final = "model.vision_tower"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4Spec:
    """Patches, blocks, and behind the last one the averages. Patches are rotated with the base `theta`, in up to
    `num_positions` rows and columns."""

    patches: AxisPatchesSpec
    blocks: tuple[Gemma4BlockSpec, ...]
    averages: AveragesSpec
    theta: float
    num_positions: int

    def build(self, ops: Ops, weights: Weights) -> Gemma4Encoder:
        """Return the encoder with its weights."""
        return Gemma4Encoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last, size = self.blocks[0], len(self.blocks) - 1, self.patches.size
        yield f"x = W patch + position[row] + position[column]  (patches of {size} x {size} pixels)"
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield "  x += norm(attention(norm(x)))"
        yield "  x += norm(mlp(norm(x)))"
        yield "  attention(h) = Wo softmax(q·k) v  over all patches of an image"
        yield f"    q = R(norm(Wq h)), k = R(norm(Wk h)), v = norm(Wv h); {block.num_heads} heads of {block.head_dim}"
        yield f"    R: rotation of one half by row and one by column, base {self.theta:g}"
        yield f"  mlp(h) = Wd (gelu(Wg h) Wu h)  of {block.intermediate_size:,}"
        if block.clipped:
            yield "  inputs and outputs of each W are held within bounds of the file"
        factor = self.averages.factor
        mean = f"sqrt({self.averages.hidden_size:,}) mean of {factor} x {factor} patches"
        inner = f"({mean} - b) s" if self.averages.standardized else mean
        yield f"\nembedding[image] = W norm({inner})  (a token for {factor * size} x {factor * size} pixels)"


class Gemma4Encoder(Encoder):
    """The patches of an image attend to each other; its bits depend on its pixels alone."""

    def __init__(self, spec: Gemma4Spec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.averages.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._averages = spec.averages.build(parts)
        assert not parts.kept, "an encoder keeps nothing"
        rotation = RotationSpec(theta=spec.theta, num_positions=spec.num_positions)
        self._rotations = Rotations(rotation, spec.blocks[0].head_dim, weights.device)
        self._tile, self._device = lru_cache(MOST_SIZES)(self._tile_of), weights.device

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        return State(*self._patches(pixels))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, tile, by = state.x, self._tile(len(state.x)), self._rotations.of(state.grid)
        for block in self._blocks[first:last]:
            x = block(x, tile, by)
        return State(x, state.grid)

    def _tile_of(self, num_patches: int) -> PagedKv:
        return segments([num_patches], self._device)

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, H]."""
        return self._averages(state.x, state.grid)


def encoder_spec(config: ModelConfig) -> Gemma4Spec:
    """Describe the encoder of a Gemma 4."""
    vision = config.vision
    assert isinstance(vision, Gemma4VisionConfig), f"{config.model_type} has no such encoder"
    return Gemma4Spec(
        patches=AxisPatchesSpec(
            name=f"{_TOWER}.patch_embedder",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            num_positions=vision.num_positions,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        averages=AveragesSpec(
            tower=_TOWER,
            embedder="model.embed_vision",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
            norm_eps=vision.norm_eps,
            standardized=vision.standardized,
        ),
        theta=vision.theta,
        num_positions=vision.max_edge // vision.patch_size,
    )


def _block(vision: Gemma4VisionConfig, layer: int) -> Gemma4BlockSpec:
    return Gemma4BlockSpec(
        name=f"{_TOWER}.encoder.layers.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        num_kv_heads=vision.num_kv_heads,
        head_dim=vision.head_dim,
        norm_eps=vision.norm_eps,
        clipped=vision.clipped,
    )
