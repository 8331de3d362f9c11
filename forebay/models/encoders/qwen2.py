"""Encoders of Qwen2-VL and Qwen2.5-VL: an image is one tile of any size. Those of the latter have windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.qwen import check_output_size
from forebay.families.config.vision.qwen2 import Qwen2Config
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.grid_encoder import (
    QUICK_GELU,
    SWIGLU,
    Grid,
    GridPatchesSpec,
    MergerSpec,
    RotaryBlockSpec,
    Rotation,
    Rotations,
    window_order,
)
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments

_VISION = "model.visual"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Spec:
    """Patches, blocks, and behind the last one the merger. Attention is within windows of `window` x `window` patches,
    and in the layers `whole` between all. Patches are rotated with the base `rope_theta`, in up to `num_positions` rows
    and columns."""

    patches: GridPatchesSpec
    blocks: tuple[RotaryBlockSpec, ...]
    merger: MergerSpec
    window: int
    whole: frozenset[int]
    rope_theta: float
    num_positions: int

    def build(self, ops: Ops, weights: Weights) -> Qwen2Encoder:
        """Return the encoder with its weights."""
        return Qwen2Encoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last, size = self.blocks[0], len(self.blocks) - 1, self.patches.size
        norm, factor = "norm" if block.rms else "layernorm", self.merger.factor
        yield f"x = W patch  (patches of {size} x {size} pixels)"
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield f"  x += attention({norm}(x))"
        yield f"  x += mlp({norm}(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v + b"
        yield f"    {self._segments()}"
        yield f"    q = R(Wq h + b), k = R(Wk h + b), v = Wv h + b; {block.num_heads} heads of {block.head_dim}"
        yield f"    R: rotation by row and column, base {self.rope_theta:g}"
        yield f"  mlp(h) = Wd {block.mlp.equation} + b  of {block.intermediate_size:,}"
        yield f"\nembedding[image] = W2 gelu(W1 {norm}(x) of {factor} x {factor} patches + b) + b"

    def _segments(self) -> str:
        whole = [str(layer) for layer in range(len(self.blocks)) if layer in self.whole]
        if len(whole) == len(self.blocks):
            return "over all patches of an image"
        layers = f"; in layers {', '.join(whole)} over all patches of an image" if whole else ""
        return f"within windows of {self.window} x {self.window} patches{layers}"


class Around(NamedTuple):
    """Tables of a grid: the patches in the `order` of windows, and the place of each in it, row by row. The rotation
    and the segments of attention, `windows` or the whole `image`, are those of that order."""

    order: Tensor  # [P] int32
    places: Tensor  # [P] int32
    by: Rotation
    windows: PagedKv
    image: PagedKv


class Qwen2Encoder(Encoder):
    """The patches of an image attend to each other; its bits depend on its pixels alone. Between layers patches lie
    window by window."""

    def __init__(self, spec: Qwen2Spec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.merger.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory)).within(_VISION)
        self._ops, self._window, self._whole, self._device = ops, spec.window, spec.whole, weights.device
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._merger = spec.merger.build(parts)
        head_dim = spec.blocks[0].head_dim
        self._rotations = Rotations(head_dim, spec.rope_theta, spec.num_positions, weights.device)
        self._around = lru_cache(MOST_SIZES)(self._around_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        x, grid = self._patches(pixels)
        return State(self._ops.drafting.gather_rows(x, self._around(grid).order), grid)

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, around = state.x, self._around(state.grid)
        for layer, block in enumerate(self._blocks[first:last], first):
            x = block(x, around.image if layer in self._whole else around.windows, around.by)
        return State(x, state.grid)

    def _around_of(self, grid: Grid) -> Around:
        order, lens = window_order(grid, self._window)
        rotation = self._rotations.of(grid)
        by = rotation._replace(positions=rotation.positions[:, order.to(self._device)])
        order, places = (each.int().to(self._device) for each in (order, torch.argsort(order)))
        windows, image = (segments(each, self._device) for each in (lens, [len(order)]))
        return Around(order, places, by, windows, image)

    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, H], row by row of the tile."""
        return self._merger(self._ops.drafting.gather_rows(state.x, self._around(state.grid).places), state.grid)


def encoder_spec(config: ModelConfig) -> Qwen2Spec:
    """Describe the encoder of a Qwen2-VL or a Qwen2.5-VL. Raises ModelError if tokens are not of the model's width."""
    vision = config.vision
    assert isinstance(vision, Qwen2Config), f"{config.model_type} has no such encoder"
    check_output_size(vision, config.hidden_size, "out_hidden_size" if vision.gated else "hidden_size")
    return Qwen2Spec(
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
        rope_theta=vision.rope_theta,
        num_positions=vision.max_edge // vision.patch_size + 1,
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
