"""Parts of an encoder of pictures: patches, blocks that attend both ways, and the connector to a language model.

Shape letters: P patches of a tile, h the encoder's hidden size, H the language model's, s patches to an edge of what
becomes one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm, layer_norm_spec
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.pictures import PixelScale

MOST_SIZES: Final = 8
"""Sizes of tiles whose tables are kept."""
PROJECTOR_EPS: Final = 1e-5
"""Of the LayerNorm in a projector: torch's default, which no configuration has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchesSpec:
    """`side` x `side` patches of `size` pixels, each through a linear layer, with a learned position: the one of its
    number, or `by_fraction` as of `position_ids`. A channel's value is multiplied by `rescale`, and then has `mean` and
    the deviation `std`."""

    name: str
    hidden_size: int
    size: int
    side: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    by_fraction: bool = True

    @property
    def equation(self) -> str:
        """Return what it computes of a patch."""
        count = f"{self.side**2:,} patches of {self.size} x {self.size} pixels"
        return f"x = W patch + b + position[patch]  (a tile has {count})"

    def build(self, parts: Parts) -> Patches:
        """Return the part with its weights."""
        return Patches(self, parts.within(self.name))


class Patches:
    """A tile's pixels to patches. The convolution of the checkpoint is a linear layer: its stride is its size."""

    def __init__(self, spec: PatchesSpec, parts: Parts) -> None:
        self._ops, self._size, self._dtype = parts.ops, spec.size, parts.weights.dtype
        self._device, width = parts.weights.device, spec.hidden_size
        kernel = parts.values("patch_embedding.weight", width, CHANNELS, spec.size, spec.size)
        weight = parts.ops.linear.pack(kernel.view(width, -1), parts.values("patch_embedding.bias", width))
        self._embedding = Linear(parts.ops, weight)
        ids = position_ids(spec.side) if spec.by_fraction else torch.arange(spec.side**2)
        self._positions = parts.tensor("position_embedding.weight", len(ids), width, change=lambda table: table[ids])
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels uint8 [height, width, 3] -> [P, h]."""
        rows = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        return self._ops.elementwise.add_(self._embedding.of(rows), self._positions)


def position_ids(side: int) -> Tensor:
    """Return which row of the table of positions each patch of a whole tile takes, [side * side] int64.

    A patch's place is a fraction of the tile, in float32, and takes the row of the interval in which it falls: another
    than its own if the fraction was rounded down (transformers' `Idefics3VisionEmbeddings`, and Patch n' Pack, arXiv
    2307.06304, section 3).
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    places = torch.bucketize(fractions, boundaries, right=True)
    return (places.unsqueeze(1) * side + places).flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexPatchesSpec:
    """Patches of `size` pixels in a tile of any size, each through a linear layer over its pixels row by row. The
    learned positions are those of `side` x `side` patches, interpolated to the tile's. A channel's value is multiplied
    by `rescale`, and then has `mean` and the deviation `std`."""

    name: str
    hidden_size: int
    size: int
    side: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def equation(self) -> str:
        """Return what it computes of a patch."""
        return (
            f"x = W patch + b + position[patch]  (of {self.size} x {self.size} pixels; positions of {self.side} x "
            f"{self.side} patches are interpolated)"
        )

    def build(self, parts: Parts) -> FlexPatches:
        """Return the part with its weights."""
        return FlexPatches(self, parts.within(self.name))


class FlexPatches:
    """A tile's pixels to patches. SigLIP 2, arXiv 2502.14786, section 2.4.2."""

    def __init__(self, spec: FlexPatchesSpec, parts: Parts) -> None:
        self._ops, self._size, self._dtype = parts.ops, spec.size, parts.weights.dtype
        self._device, width, size = parts.weights.device, spec.hidden_size, spec.size
        by_row = parts.values("patch_embedding.weight", width, CHANNELS * size * size)
        by_channel = by_row.view(width, size * size, CHANNELS).transpose(1, 2).reshape(width, -1)
        weight = parts.ops.linear.pack(by_channel, parts.values("patch_embedding.bias", width))
        self._embedding = Linear(parts.ops, weight)
        self._table = parts.tensor("position_embedding.weight", spec.side**2, width)
        self._side = spec.side
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels uint8 [height, width, 3] -> [P, h]."""
        height, width, _ = pixels.shape
        rows = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        positions = self._positions_of((height // self._size, width // self._size))
        return self._ops.elementwise.add_(self._embedding.of(rows), positions)

    def _positions_of(self, grid: tuple[int, int]) -> Tensor:
        """Interpolate the table to a grid of patches, in float32: [P, h]."""
        table = self._table.float().view(1, self._side, self._side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(table, size=grid, mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).T.to(self._dtype).contiguous()


def pixel_scale(rescale: float, mean: Sequence[float], std: Sequence[float], device: torch.device | str) -> PixelScale:
    """Return what makes numbers of `mean` and deviation `std` of pixels that are multiplied by `rescale`."""
    factors = [rescale / each for each in std]
    shifts = [-each / deviation for each, deviation in zip(mean, std, strict=True)]
    return PixelScale(*(torch.tensor(numbers, device=device) for numbers in (factors, shifts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBlockSpec:
    """Attention and a feed-forward layer, each behind a LayerNorm; all layers have biases."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def build(self, parts: Parts) -> EncoderBlock:
        """Return the block with its weights."""
        return EncoderBlock(self, parts)


class EncoderBlock:
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)). Vision Transformer, arXiv 2010.11929, section 3.1."""

    def __init__(self, spec: EncoderBlockSpec, parts: Parts) -> None:
        self._ops, self._heads, self._scale = parts.ops, spec.num_heads, spec.head_dim**-0.5
        width, inner = spec.hidden_size, spec.intermediate_size
        self._norms = [
            build_norm(layer_norm_spec(f"{spec.name}.layer_norm{i}", width, bias=True), parts, spec.norm_eps).of
            for i in (1, 2)
        ]
        attention, mlp = parts.within(f"{spec.name}.self_attn"), parts.within(f"{spec.name}.mlp")
        self._qkv = attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width, bias=True)
        self._out = attention.linear({"out_proj": width}, width, bias=True)
        self._up = mlp.linear({"fc1": inner}, width, bias=True)
        self._down = mlp.linear({"fc2": width}, inner, bias=True)

    def __call__(self, x: Tensor, tile: PagedKv) -> Tensor:
        """x [P, h], which stays as it is -> [P, h]. `tile` says which patches attend to each other."""
        ops, (norm_attention, norm_mlp) = self._ops, self._norms
        q, k, v = self._qkv.of(norm_attention(x)).view(len(x), 3, self._heads, -1).unbind(1)
        attended = ops.attention.paged_attention(q, KvCache(k, v), tile, scale=self._scale)
        x = ops.elementwise.add_(self._out.of(attended.flatten(1)), x)
        return ops.elementwise.add_(self._down.of(ops.elementwise.gelu(self._up.of(norm_mlp(x)))), x)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorSpec:
    """Squares of `factor` x `factor` patches, each through one linear layer without a bias."""

    name: str
    factor: int
    hidden_size: int
    output_size: int

    @property
    def equation(self) -> str:
        """Return what it computes of a token's patches, x."""
        return f"W layernorm(x) of {self.factor} x {self.factor} patches"

    def build(self, parts: Parts) -> Connector:
        """Return the part with its weights."""
        return Connector(self, parts)


class Connector:
    """Pixel shuffle and projection: a token is a square of patches, row by row (arXiv 2408.12637, section 3.1)."""

    def __init__(self, spec: ConnectorSpec, parts: Parts) -> None:
        self._ops, factor = parts.ops, spec.factor
        self._width = factor**2 * spec.hidden_size
        self._projection = parts.linear({spec.name: spec.output_size}, self._width)
        self._order = square_orders(factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [P, h] of a grid of patches -> [P / s^2, H]."""
        return self._projection.of(self._ops.drafting.gather_rows(x, self._order(grid)).view(-1, self._width))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Averages of squares of `factor` x `factor` patches, each normed and through one linear layer without a bias."""

    name: str
    factor: int
    hidden_size: int
    output_size: int
    norm_eps: float

    @property
    def equation(self) -> str:
        """Return what it computes of a square."""
        return f"W rmsnorm(mean of layernorm(x) of {self.factor} x {self.factor} patches)"

    def build(self, parts: Parts) -> Pool:
        """Return the part with its weights."""
        return Pool(self, parts.within(self.name))


class Pool:
    """A token is the average of a square of patches, row by row. The norm's weight is a difference from 1, and the
    projection's has inputs before outputs (Gemma 3, arXiv 2503.19786, section 2.1)."""

    def __init__(self, spec: PoolSpec, parts: Parts) -> None:
        self._ops, self._eps, self._count = parts.ops, spec.norm_eps, spec.factor**2
        self._norm = parts.tensor("mm_soft_emb_norm.weight", spec.hidden_size, offset=1.0)
        weight = parts.values("mm_input_projection_weight", spec.hidden_size, spec.output_size)
        self._projection = Linear(parts.ops, parts.ops.linear.pack(weight.T.contiguous()))
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [P, h] of a grid of patches -> [P / s^2, H]."""
        means = self._ops.pictures.mean_rows(self._ops.drafting.gather_rows(x, self._order(grid)), self._count)
        return self._projection.of(self._ops.norms.rms_norm(means, self._norm, self._eps))


def square_orders(factor: int, device: torch.device | str) -> Callable[[tuple[int, int]], Tensor]:
    """Return a function from a grid of patches to their order, [P] int32. Squares of `factor` x `factor` follow each
    other row by row, and so do the patches of each."""

    @lru_cache(MOST_SIZES)
    def order(grid: tuple[int, int]) -> Tensor:
        rows, columns = grid
        squares = torch.arange(rows * columns).view(rows // factor, factor, columns // factor, factor)
        return squares.transpose(1, 2).flatten().int().to(device)

    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorSpec:
    """Squares of `factor` x `factor` patches, each through two linear layers with a GELU between them, behind a
    LayerNorm with `norm`. The linear layers have biases with `bias`."""

    name: str
    factor: int
    hidden_size: int
    inner_size: int
    output_size: int
    norm: bool
    bias: bool

    @property
    def equation(self) -> str:
        """Return what it computes of a token's patches, x."""
        square = f"layernorm(x) of {self.factor} x {self.factor} patches"
        inner = f"layernorm({square})" if self.norm else square
        plus = " + b" if self.bias else ""
        return f"Wd gelu(Wu {inner}{plus}){plus}  of {self.inner_size:,}"

    def build(self, parts: Parts) -> Projector:
        """Return the part with its weights."""
        return Projector(self, parts.within(self.name))


class Projector:
    """Pixel shuffle and an MLP: a token is a square of patches, row by row."""

    def __init__(self, spec: ProjectorSpec, parts: Parts) -> None:
        self._ops, self._width = parts.ops, spec.factor**2 * spec.hidden_size
        norm = layer_norm_spec(f"{parts.prefix}layer_norm", self._width, bias=True)
        self._norm = build_norm(norm, parts, PROJECTOR_EPS).of if spec.norm else None
        self._up = parts.linear({"linear_1": spec.inner_size}, self._width, bias=spec.bias)
        self._down = parts.linear({"linear_2": spec.output_size}, spec.inner_size, bias=spec.bias)
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x [P, h] of a grid of patches -> [P / s^2, H]."""
        x = self._ops.drafting.gather_rows(x, self._order(grid)).view(-1, self._width)
        x = x if self._norm is None else self._norm(x)
        return self._down.of(self._ops.elementwise.gelu(self._up.of(x), exact=True))
