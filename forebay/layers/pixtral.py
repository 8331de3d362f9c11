"""Parts of Pixtral's encoder: patches, blocks that are rotated by row and column, and the merger of patches.

Shape letters: P patches of a tile, h the encoder's hidden size, H the language model's, D a head's dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale, square_orders
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm
from forebay.layers.params import vector
from forebay.layers.rotary import inverse_frequencies
from forebay.ops.reference.attention import KvCache, PagedKv


class TileRope(NamedTuple):
    """Which patches of a tile attend to each other; each patch's position, [P] int64, in the table `cos_sin` of its
    tile, [P, D] float32."""

    tile: PagedKv
    positions: Tensor
    cos_sin: Tensor


def axial_table(grid: tuple[int, int], head_dim: int, theta: float) -> Tensor:
    """Return the cosines and then the sines of each patch of a grid, row by row: [P, D] float32.

    The even frequencies turn by the row, and behind them the odd ones by the column (arXiv 2410.07073, section 2.2).
    """
    frequencies, _ = inverse_frequencies(head_dim=head_dim, theta=theta, scaling=None)
    rows, columns = (torch.arange(count, dtype=torch.float32) for count in grid)
    by_row = (rows.unsqueeze(1) * frequencies[0::2]).repeat_interleave(grid[1], 0)
    by_column = (columns.unsqueeze(1) * frequencies[1::2]).repeat(grid[0], 1)
    angles = torch.cat([by_row, by_column], dim=1)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PixtralPatchesSpec:
    """Patches of `size` pixels, each through a linear layer and an RMSNorm. A channel's value is multiplied by
    `rescale`, and then has `mean` and the deviation `std`."""

    name: str
    hidden_size: int
    size: int
    norm_eps: float
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def build(self, parts: Parts) -> PixtralPatches:
        """Return the part with its weights."""
        return PixtralPatches(self, parts)


class PixtralPatches:
    """A tile's pixels to patches. The convolution of the checkpoint is a linear layer: its stride is its size."""

    def __init__(self, spec: PixtralPatchesSpec, parts: Parts) -> None:
        own, width, size = parts.within(spec.name), spec.hidden_size, spec.size
        self._ops, self._size, self._dtype = parts.ops, size, parts.weights.dtype
        self._device = parts.weights.device
        kernel = own.values("patch_conv.weight", width, CHANNELS, size, size)
        self._embedding = Linear(parts.ops, parts.ops.linear.pack(kernel.view(width, -1)))
        self._norm = build_norm(vector(f"{spec.name}.ln_pre.weight", width), parts, spec.norm_eps).of
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels uint8 [height, width, 3] -> [P, h]."""
        rows = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        return self._norm(self._embedding.of(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class PixtralBlockSpec:
    """Attention and a gated feed-forward layer, each behind an RMSNorm, without biases."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    gelu: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def build(self, parts: Parts) -> PixtralBlock:
        """Return the block with its weights."""
        return PixtralBlock(self, parts)


class PixtralBlock:
    """A layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: PixtralBlockSpec, parts: Parts) -> None:
        self._ops, self._heads, self._scale = parts.ops, spec.num_heads, spec.head_dim**-0.5
        width, inner = spec.hidden_size, spec.intermediate_size
        self._norms = [
            build_norm(vector(f"{spec.name}.{name}.weight", width), parts, spec.norm_eps).of
            for name in ("attention_norm", "ffn_norm")
        ]
        attention, mlp = parts.within(f"{spec.name}.attention"), parts.within(f"{spec.name}.feed_forward")
        self._qkv = attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width)
        self._out = attention.linear({"o_proj": width}, width)
        self._up = mlp.linear(dict.fromkeys(("gate_proj", "up_proj"), inner), width)
        self._down = mlp.linear({"down_proj": width}, inner)
        self._activate = (
            partial(self._ops.elementwise.gelu_and_mul, exact=True) if spec.gelu else self._ops.elementwise.silu_and_mul
        )

    def __call__(self, x: Tensor, around: TileRope) -> Tensor:
        """x [P, h], which stays as it is -> [P, h]."""
        ops, (norm_attention, norm_mlp) = self._ops, self._norms
        q, k, v = self._qkv.of(norm_attention(x)).view(len(x), 3, self._heads, -1).unbind(1)
        ops.attention.apply_rope(q, k, around.positions, around.cos_sin)
        attended = ops.attention.paged_attention(q, KvCache(k, v), around.tile, scale=self._scale)
        x = ops.elementwise.add_(self._out.of(attended.flatten(1)), x)
        return ops.elementwise.add_(self._down.of(self._activate(self._up.of(norm_mlp(x)))), x)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergerSpec:
    """An RMSNorm, squares of `factor` x `factor` patches through one linear layer to one patch, and an MLP with a GELU.
    The MLP has biases with `bias`."""

    name: str
    factor: int
    hidden_size: int
    output_size: int
    norm_eps: float
    bias: bool

    def build(self, parts: Parts) -> Merger:
        """Return the part with its weights."""
        return Merger(self, parts)


class Merger:
    """Patches to tokens: a token is a square of patches, row by row."""

    def __init__(self, spec: MergerSpec, parts: Parts) -> None:
        own, width, size = parts.within(spec.name), spec.hidden_size, spec.factor**2
        self._ops, self._width = parts.ops, size * width
        self._norm = build_norm(vector(f"{spec.name}.norm.weight", width), parts, spec.norm_eps).of
        by_channel = own.values("patch_merger.merging_layer.weight", width, size * width)
        by_patch = by_channel.view(width, width, size).transpose(1, 2).reshape(width, -1)
        self._merge = Linear(parts.ops, parts.ops.linear.pack(by_patch))
        self._up = own.linear({"linear_1": spec.output_size}, width, bias=spec.bias)
        self._down = own.linear({"linear_2": spec.output_size}, spec.output_size, bias=spec.bias)
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [P, h] of a grid of patches -> [P / s^2, H]."""
        squares = self._ops.drafting.gather_rows(self._norm(x), self._order(grid)).view(-1, self._width)
        return self._down.of(self._ops.elementwise.gelu(self._up.of(self._merge.of(squares)), exact=True))
