"""gemma4_unified's part for pictures: one layer, in which no patch sees another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.gemma4_unified import UnifiedVisionConfig
from forebay.layers.build import Parts
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.layers.unified_encoder import NormedPatchesSpec, PlacedPatchesSpec, ProjectedSpec
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops

_NAME: Final = "model.embed_vision"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedSpec:
    """Patches of pixels, the layer that places them, and the projection."""

    patches: NormedPatchesSpec
    placed: PlacedPatchesSpec
    projected: ProjectedSpec

    def build(self, ops: Ops, weights: Weights) -> UnifiedEncoder:
        """Return the encoder with its weights."""
        return UnifiedEncoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        size = self.patches.size
        yield f"x = layernorm(patch)  (of {size} x {size} pixels)"
        yield "\nlayer 0:"
        yield "  x = layernorm(layernorm(W x + b) + position[column] + position[row])"
        yield f"\nembedding[image] = W norm(x)  (a token for {size} x {size} pixels)"


class UnifiedEncoder(Encoder):
    """A token depends on the pixels of its own patch, and on the patch's place."""

    def __init__(self, spec: UnifiedSpec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, 1, spec.projected.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._placed = spec.placed.build(parts)
        self._projected = spec.projected.build(parts)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the layer."""
        return State(*self._patches(pixels))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run the layer, number 0, if it is among `first` up to, not including, `last`."""
        return State(self._placed(state.x, state.grid), state.grid) if first == 0 < last else state

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the layer into [tokens of the tile, H]."""
        return self._projected(state.x)


def encoder_spec(config: ModelConfig) -> UnifiedSpec:
    """Describe the part for pictures of a gemma4_unified model."""
    vision = config.vision
    assert isinstance(vision, UnifiedVisionConfig), f"{config.model_type} has no such encoder"
    return UnifiedSpec(
        patches=NormedPatchesSpec(
            name=_NAME,
            size=vision.patch_size,
            norm_eps=vision.norm_eps,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        placed=PlacedPatchesSpec(
            name=_NAME,
            num_inputs=CHANNELS * vision.patch_size**2,
            hidden_size=vision.hidden_size,
            num_positions=vision.num_positions,
            norm_eps=vision.norm_eps,
        ),
        projected=ProjectedSpec(
            name=f"{_NAME}.multimodal_embedder",
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
            norm_eps=vision.rms_eps,
        ),
    )
