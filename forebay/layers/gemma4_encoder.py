"""Parts of Gemma 4's encoder: patches with a position for each axis, blocks whose linear layers may be held within
bounds, and averages of squares of patches.

Shape letters: P patches of a tile, row by row; h the encoder's hidden size, D its heads' size, H the language model's,
s patches to an edge of what becomes one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale, square_orders
from forebay.layers.grid_encoder import Grid, Rotation
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm
from forebay.layers.params import Rows, in_order, vector
from forebay.ops.reference.attention import KvCache, PagedKv

_NORMS: Final = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPatchesSpec:
    """Patches of `size` pixels, each through a linear layer over its pixels row by row. A patch has the sum of two
    learned positions, of its column and of its row; there are `num_positions` of each. A channel's value is multiplied
    by `rescale`, and then has `mean` and the deviation `std`."""

    name: str
    hidden_size: int
    size: int
    num_positions: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def build(self, parts: Parts) -> AxisPatches:
        """Return the part with its weights."""
        return AxisPatches(self, parts.within(self.name))


class AxisPatches:
    """A tile's pixels to patches."""

    def __init__(self, spec: AxisPatchesSpec, parts: Parts) -> None:
        self._ops, self._size, self._dtype = parts.ops, spec.size, parts.weights.dtype
        self._device, width, pixels = parts.weights.device, spec.hidden_size, spec.size**2
        by_row = parts.values("input_proj.weight", width, pixels * CHANNELS)
        by_channel = by_row.view(width, pixels, CHANNELS).transpose(1, 2).reshape(width, -1)
        self._embedding = Linear(parts.ops, parts.ops.linear.pack(by_channel))
        self._positions = parts.tensor("position_embedding_table", 2, spec.num_positions, width)
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """pixels uint8 [height, width, 3] -> [P, h], and the rows and columns of patches."""
        rows, columns = pixels.shape[0] // self._size, pixels.shape[1] // self._size
        patches = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        of_columns, of_rows = self._positions[0, :columns], self._positions[1, :rows]
        positions = (of_rows.unsqueeze(1) + of_columns).flatten(0, 1)
        return self._ops.elementwise.add_(self._embedding.of(patches), positions), (rows, columns)


class ClippedLinear:
    """A linear layer without a bias; if it is `clipped`, its inputs and outputs are held within bounds of the file."""

    def __init__(self, parts: Parts, outputs: int, inputs: int, *, clipped: bool, rows: Rows = ()) -> None:
        self._linear = parts.linear({"linear": outputs}, inputs, rows=rows)
        names = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
        self._bounds = [parts.bound(name) for name in names]

    def of(self, x: Tensor) -> Tensor:
        """x [P, K], which stays as it is -> [P, N]."""
        if not self._bounds:
            return self._linear.of(x)
        least, most, least_out, most_out = self._bounds
        return self._linear.of(x.clamp(least, most)).clamp_(least_out, most_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4BlockSpec:
    """Attention over patches that are rotated by their rows and columns, and a gated feed-forward layer, each between
    two RMS norms. Queries, keys and values are normed, values without a weight. `clipped`: see `ClippedLinear`."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    clipped: bool

    def build(self, parts: Parts) -> Gemma4Block:
        """Return the block with its weights."""
        return Gemma4Block(self, parts.within(self.name))


class Gemma4Block:
    """A layer: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, spec: Gemma4BlockSpec, parts: Parts) -> None:
        self._ops, self._spec = parts.ops, spec
        width, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        self._norms = [
            build_norm(vector(f"{parts.prefix}{name}.weight", width), parts, spec.norm_eps).of for name in _NORMS
        ]

        def linear(name: str, outputs: int, inputs: int, rows: Rows = ()) -> ClippedLinear:
            return ClippedLinear(parts.within(name), outputs, inputs, clipped=spec.clipped, rows=rows)

        order, read, kept = rotary_order(dim), spec.num_heads, spec.num_kv_heads
        self._qkv = (
            linear("self_attn.q_proj", read * dim, width, _of_heads(order, read)),
            linear("self_attn.k_proj", kept * dim, width, _of_heads(order, kept)),
            linear("self_attn.v_proj", kept * dim, width),
        )
        q_norm, k_norm = (
            parts.tensor(f"self_attn.{name}.weight", dim, change=partial(in_order, rows=order))
            for name in ("q_norm", "k_norm")
        )
        self._head_norms = q_norm, k_norm, parts.ones(dim)
        self._out = linear("self_attn.o_proj", width, read * dim)
        self._gate, self._up = (linear(f"mlp.{name}", inner, width) for name in ("gate_proj", "up_proj"))
        self._down = linear("mlp.down_proj", width, inner)

    def __call__(self, x: Tensor, tile: PagedKv, by: Rotation) -> Tensor:
        """x [P, h], which stays as it is -> [P, h]. `tile` says which patches attend to each other."""
        ops, (before_attention, after_attention, before_mlp, after_mlp) = self._ops, self._norms
        attended = self._attended(before_attention(x), tile, by)
        x = ops.elementwise.add_(after_attention(self._out.of(attended)), x)
        normed = before_mlp(x)
        inner = ops.elementwise.mul(ops.elementwise.gelu(self._gate.of(normed)), self._up.of(normed))
        return ops.elementwise.add_(after_mlp(self._down.of(inner)), x)

    def _attended(self, normed: Tensor, tile: PagedKv, by: Rotation) -> Tensor:
        """Attend over all patches of a tile, [P, h] -> [P, Hq * D]."""
        ops, spec = self._ops, self._spec
        q, k, v = (
            ops.norms.rms_norm(linear.of(normed).view(len(normed), -1, spec.head_dim), weight, spec.norm_eps)
            for linear, weight in zip(self._qkv, self._head_norms, strict=True)
        )
        ops.attention.apply_rope(q, k, by.positions, by.cos_sin, axes=by.axes)
        return ops.attention.paged_attention(q, KvCache(k, v), tile, scale=1.0).flatten(1)


def rotary_order(head_dim: int) -> Rows:
    """Return the order of a head's dimensions in which pairs are half a head apart, and those of rows come first.

    Files have the dimensions that turn by the column, then those that turn by the row; pairs are in the halves of each.
    """
    size = head_dim // 4
    column, column_second, row, row_second = (range(at * size, (at + 1) * size) for at in range(4))
    return row, column, row_second, column_second


def _of_heads(order: Rows, count: int) -> Rows:
    """Return the order of the dimensions of `count` heads, each in `order`."""
    dim = sum(map(len, order))
    return tuple(range(at + part.start, at + part.stop) for at in range(0, count * dim, dim) for part in order)


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragesSpec:
    """Averages of squares of `factor` x `factor` patches, times the root of the hidden size, with a mean and a scale of
    the file if they are `standardized`; then normed and through one linear layer without a bias."""

    tower: str
    embedder: str
    factor: int
    hidden_size: int
    output_size: int
    norm_eps: float
    standardized: bool

    def build(self, parts: Parts) -> Averages:
        """Return the part with its weights."""
        return Averages(self, parts)


class Averages:
    """Patches to tokens, row by row."""

    def __init__(self, spec: AveragesSpec, parts: Parts) -> None:
        self._ops, self._eps, self._count, width = parts.ops, spec.norm_eps, spec.factor**2, spec.hidden_size
        tower = parts.within(spec.tower)
        self._standard = [tower.tensor(name, width) for name in ("std_bias", "std_scale") if spec.standardized]
        self._root, self._plain = float(width) ** 0.5, parts.ones(width)
        self._projection = parts.within(spec.embedder).linear({"embedding_projection": spec.output_size}, width)
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """x [P, h] of a grid of patches -> [P / s^2, H]."""
        means = self._ops.pictures.mean_rows(self._ops.drafting.gather_rows(x, self._order(grid)), self._count)
        # Whole in float32: the root makes numbers large, and of large ones a mean is subtracted.
        tokens = means.float() * self._root
        if self._standard:
            mean, scale = self._standard
            tokens = (tokens - mean.float()) * scale.float()
        return self._projection.of(self._ops.norms.rms_norm(tokens.to(x.dtype), self._plain, self._eps))
