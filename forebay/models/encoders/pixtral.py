"""Pixtral, with a patch merger behind it: the encoder of Mistral 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.pixtral import PixtralConfig
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.params import Weights
from forebay.layers.pixtral import MergerSpec, PixtralBlockSpec, PixtralPatchesSpec, TileRope, axial_table
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import segments

_VISION = "model.vision_tower"


@dataclass(frozen=True, kw_only=True, slots=True)
class PixtralSpec:
    """Patches, blocks that are rotated at the base `theta`, and the merger."""

    patches: PixtralPatchesSpec
    blocks: tuple[PixtralBlockSpec, ...]
    merger: MergerSpec
    theta: float

    def build(self, ops: Ops, weights: Weights) -> PixtralEncoder:
        """Return the encoder with its weights."""
        return PixtralEncoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last, size = self.blocks[0], len(self.blocks) - 1, self.patches.size
        gate, plus = "gelu" if block.gelu else "silu", " + b" if self.merger.bias else ""
        yield f"x = norm(W patch)  (of {size} x {size} pixels)"
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield "  x += attention(norm(x))"
        yield "  x += mlp(norm(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v  over all patches of a tile"
        yield f"    q = rope(Wq h), k = rope(Wk h), v = Wv h; {block.num_heads} heads of {block.head_dim}"
        yield f"    rope: half of the frequencies by the row, half by the column, theta {self.theta:,.0f}"
        yield f"  mlp(h) = Wd ({gate}(Wg h) Wu h)  of {block.intermediate_size:,}"
        square = f"norm(x) of {self.merger.factor} x {self.merger.factor} patches"
        edge = size * self.merger.factor
        yield f"\nembedding[image] = Wd gelu(Wu Wm {square}{plus}){plus}  (a token for {edge} x {edge} pixels)"


class PixtralEncoder(Encoder):
    """The patches of a tile attend to each other; a tile's bits depend on its pixels alone."""

    def __init__(self, spec: PixtralSpec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.merger.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._merger = spec.merger.build(parts)
        assert not parts.kept, "an encoder keeps nothing"
        self._size, self._device = spec.patches.size, weights.device
        self._head_dim, self._theta = spec.blocks[0].head_dim, spec.theta
        self._around = lru_cache(MOST_SIZES)(self._around_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        height, width, _ = pixels.shape
        return State(self._patches(pixels), (height // self._size, width // self._size))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, around = state.x, self._around(state.grid)
        for block in self._blocks[first:last]:
            x = block(x, around)
        return State(x, state.grid)

    def _around_of(self, grid: tuple[int, int]) -> TileRope:
        table = axial_table(grid, self._head_dim, self._theta).to(self._device)
        positions = torch.arange(len(table), device=self._device)
        return TileRope(segments([len(table)], self._device), positions, table)

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, H]."""
        return self._merger(state.x, state.grid)


def encoder_spec(config: ModelConfig) -> PixtralSpec:
    """Describe the encoder of a Mistral 3."""
    vision = config.vision
    assert isinstance(vision, PixtralConfig), f"{config.model_type} has no such encoder"
    return PixtralSpec(
        patches=PixtralPatchesSpec(
            name=_VISION,
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            norm_eps=vision.norm_eps,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        merger=MergerSpec(
            name="model.multi_modal_projector",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
            norm_eps=config.rms_norm_eps,
            bias=vision.projector_bias,
        ),
        theta=vision.theta,
    )


def _block(vision: PixtralConfig, layer: int) -> PixtralBlockSpec:
    return PixtralBlockSpec(
        name=f"{_VISION}.transformer.layers.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
        gelu=vision.gelu,
    )
