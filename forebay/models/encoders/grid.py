"""Encoders that read an image of any size as one tile, perhaps in windows: those of Qwen2-VL, Kimi and Muse Glimmer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.grid_encoder import Grid, RotaryBlockSpec, Rotation, Rotations, RotationSpec, window_order
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments


class PatchesSpec(Protocol):
    """From pixels to patches."""

    @property
    def equation(self) -> str: ...

    def build(self, parts: Parts) -> Callable[[Tensor], tuple[Tensor, Grid]]:
        """Return the part with its weights."""


class MergerSpec(Protocol):
    """From patches to tokens of `output_size` numbers."""

    @property
    def output_size(self) -> int: ...

    @property
    def equation(self) -> str: ...

    def build(self, parts: Parts) -> Callable[[Tensor, Grid], Tensor]:
        """Return the part with its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSpec:
    """Patches, blocks, and behind the last one the merger. Attention is within windows of `window` x `window` patches,
    and in the layers `whole` between all. Names of weights are below `name`."""

    name: str
    patches: PatchesSpec
    blocks: tuple[RotaryBlockSpec, ...]
    merger: MergerSpec
    window: int
    whole: frozenset[int]
    rotation: RotationSpec

    def build(self, ops: Ops, weights: Weights) -> GridEncoder:
        """Return the encoder with its weights."""
        return GridEncoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last = self.blocks[0], len(self.blocks) - 1
        norm = "norm" if block.rms else "layernorm"
        yield self.patches.equation
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield f"  x += attention({norm}(x))"
        yield f"  x += mlp({norm}(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v + b"
        yield f"    {self._segments()}"
        yield f"    q = R(Wq h + b), k = R(Wk h + b), v = Wv h + b; {block.num_heads} heads of {block.head_dim}"
        yield f"    R: rotation by row and column, base {self.rotation.theta:g}"
        yield f"  mlp(h) = Wd {block.mlp.equation} + b  of {block.intermediate_size:,}"
        yield f"\nembedding[image] = {self.merger.equation}"

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


class GridEncoder(Encoder):
    """The patches of an image attend to each other; its bits depend on its pixels alone. Between layers patches lie
    window by window."""

    def __init__(self, spec: GridSpec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.merger.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory)).within(spec.name)
        self._ops, self._window, self._whole, self._device = ops, spec.window, spec.whole, weights.device
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._merger = spec.merger.build(parts)
        self._rotations = Rotations(spec.rotation, spec.blocks[0].head_dim, weights.device)
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
