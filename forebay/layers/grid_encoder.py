"""Parts of encoders whose tiles have any number of rows and columns of patches.

Shape letters: P patches of a tile, row by row; h the encoder's hidden size, D its heads' size, H the language model's,
s patches to an edge of what becomes one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES, pixel_scale, square_orders
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm, layer_norm_spec
from forebay.layers.params import Rows, vector
from forebay.layers.rotary import cos_sin_table
from forebay.ops import Ops
from forebay.ops.reference.attention import KvCache, PagedKv

Grid = tuple[int, int]
"""Rows and columns of patches."""

AXES: Final = 2  # rotary positions of a patch: its row and its column


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPatchesSpec:
    """Patches of `size` pixels, each through a linear layer, whose kernel sees an image `depth` times. A table of
    `side` x `side` positions is interpolated to the patches, and the layer has a bias; if `side` is 0, there is
    neither. Channels as of `PatchesSpec`."""

    hidden_size: int
    size: int
    depth: int
    side: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def equation(self) -> str:
        """Return what it computes of a patch."""
        positions = " + b + position[row, column]" if self.side else ""
        return f"x = W patch{positions}  (patches of {self.size} x {self.size} pixels)"

    def build(self, parts: Parts) -> GridPatches:
        """Return the part with its weights."""
        return GridPatches(self, parts)


class GridPatches:
    """A tile's pixels to patches. All frames that a kernel sees are the image, so its weights for them are summed."""

    def __init__(self, spec: GridPatchesSpec, parts: Parts) -> None:
        self._ops, self._spec, self._dtype = parts.ops, spec, parts.weights.dtype
        self._device, width = parts.weights.device, spec.hidden_size
        kernel = parts.values("patch_embed.proj.weight", width, CHANNELS, spec.depth, spec.size, spec.size)
        summed = kernel.float().sum(2).to(kernel.dtype).view(width, -1)
        bias = parts.values("patch_embed.proj.bias", width) if spec.side else None
        self._embedding = Linear(parts.ops, parts.ops.linear.pack(summed, bias))
        self._positions = parts.tensor("pos_embed.weight", spec.side**2, width) if spec.side else None
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """pixels uint8 [height, width, 3] -> [P, h], and the rows and columns of patches."""
        size = self._spec.size
        grid = pixels.shape[0] // size, pixels.shape[1] // size
        rows = self._ops.pictures.patch_rows(pixels.to(self._device), size, self._scale, self._dtype)
        x = self._embedding.of(rows)
        if self._positions is None:
            return x, grid
        by_row, by_column = (taps(count, self._spec.side) for count in grid)
        return self._ops.elementwise.add_(x, interpolated(self._positions, by_row, by_column)), grid


class Taps(NamedTuple):
    """Entries of an axis of `side` that are next to places along it, some for each, [count], and their weights."""

    side: int
    places: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


def interpolated(table: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """Return of each patch, row by row, the weighted sum of the positions of a `table` that are nearest, [P, h] of the
    table's dtype. It is summed in float32 in a fixed order."""
    total: Tensor | None = None
    for row, of_row in zip(rows.places, rows.weights, strict=True):
        for column, of_column in zip(columns.places, columns.weights, strict=True):
            places = (row.unsqueeze(1) * columns.side + column).flatten().to(table.device)
            weights = (of_row.unsqueeze(1) * of_column).reshape(-1, 1).to(table.device)
            part = table.index_select(0, places).float() * weights
            total = part if total is None else total + part
    assert total is not None, "a patch lies between positions"
    return total.to(table.dtype)


def taps(count: int, side: int) -> Taps:
    """Spread `count` places evenly over a table of `side` entries: the first and the last are the table's own. Bilinear
    interpolation with aligned corners, in float32."""
    at = torch.arange(count, dtype=torch.float32) * (side - 1) / max(count - 1, 1)
    below = at.floor()
    share = at - below
    first = below.long()
    return Taps(side, (first, (first + 1).clamp(max=side - 1)), (1 - share, share))


def _between(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the entry before each of `count` places of equal size along a table of `side` entries, -1 before the first
    one. The second tensor is the share of the way to the next entry, in float32."""
    at = (torch.arange(count, dtype=torch.float32) + 0.5) * side / count - 0.5
    below = at.floor()
    return below.long(), at - below


def linear_taps(count: int, side: int) -> Taps:
    """Return the two nearest entries of each place, and those beyond the table with the weight 0."""
    first, share = _between(count, side)
    places, weights = (first, first + 1), (1 - share, share)
    within = [(place >= 0) & (place < side) for place in places]
    return Taps(
        side,
        tuple(place.clamp(0, side - 1) for place in places),
        tuple(weight * inside for weight, inside in zip(weights, within, strict=True)),
    )


def cubic_taps(count: int, side: int) -> Taps:
    """Return the four nearest entries of each place, the table's last one for those beyond it. Their weights are those
    of Keys' cubic convolution with a = -0.75, as torch's bicubic interpolation has it."""
    first, share = _between(count, side)
    a = -0.75
    near = [((a + 2) * x - (a + 3)) * x * x + 1 for x in (share, 1 - share)]
    far = [((a * x - 5 * a) * x + 8 * a) * x - 4 * a for x in (share + 1, 2 - share)]
    places = tuple((first + step).clamp(0, side - 1) for step in range(-1, 3))
    return Taps(side, places, (far[0], *near, far[1]))


class Mlp(NamedTuple):
    """A feed-forward layer of two linear layers: their names, the activation between them, and its equation."""

    up: tuple[str, ...]
    down: str
    activation: Callable[[Ops], Callable[[Tensor], Tensor]]
    equation: str


def quick_gelu(ops: Ops) -> Callable[[Tensor], Tensor]:
    """Return x * sigmoid(1.702 x) (arXiv 1606.08415, section 2). In bfloat16 transformers rounds the sigmoid, too."""
    return lambda x: ops.elementwise.mul_sigmoid(x, x * 1.702)


GELU: Final = Mlp(("linear_fc1",), "linear_fc2", lambda ops: ops.elementwise.gelu, "gelu(Wu h + b)")
EXACT_GELU: Final = Mlp(("fc1",), "fc2", lambda ops: partial(ops.elementwise.gelu, exact=True), "gelu(Wu h + b)")
QUICK_GELU: Final = Mlp(("fc1",), "fc2", quick_gelu, "quick_gelu(Wu h + b)")
SWIGLU: Final = Mlp(
    ("gate_proj", "up_proj"), "down_proj", lambda ops: ops.elementwise.silu_and_mul, "(silu(Wg h + b) (Wu h + b))"
)


class BlockNames(NamedTuple):
    """How files call the norms of a block, its queries, keys and values, and the layer behind attention."""

    norms: tuple[str, str] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)
    out: str = "attn.proj"


PLAIN_NAMES: Final = BlockNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryBlockSpec:
    """Attention over patches that are rotated by their rows and columns, and a feed-forward layer `mlp`; all layers
    have biases. Both are behind a LayerNorm, or with `rms` behind an RMS norm. With `neighbours` the two numbers of a
    head that are rotated together are next to each other in the files."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    mlp: Mlp = GELU
    rms: bool = False
    names: BlockNames = PLAIN_NAMES
    neighbours: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def build(self, parts: Parts) -> RotaryBlock:
        """Return the block with its weights."""
        return RotaryBlock(self, parts.within(self.name))


class Rotation(NamedTuple):
    """How a tile's patches are rotated: see `apply_rope`."""

    positions: Tensor  # [2, P] int64
    cos_sin: Tensor  # [positions, D] float32
    axes: Tensor  # [D / 2] int32


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationSpec:
    """Which frequencies of a head turn by a patch's row, and which by its column, with the base `theta`, in up to
    `num_positions` of either. The row comes first, or with `columns_first` the column. Frequencies of one follow those
    of the other, or with `by_turns` each is followed by the same one of the other. Positions begin with `first`."""

    theta: float
    num_positions: int
    columns_first: bool = False
    by_turns: bool = False
    first: int = 0


class Rotations:
    """The rotation of tiles. Each half of a head's frequencies is rotated by one coordinate; both have the same
    ones (2D-RoPE, arXiv 2409.12191, section 2.1)."""

    def __init__(self, spec: RotationSpec, head_dim: int, device: torch.device | str) -> None:
        self._spec, self._head_dim = spec, head_dim
        order = torch.tensor((1, 0) if spec.columns_first else (0, 1), dtype=torch.int32)
        count = head_dim // 2 // AXES
        axes = order.repeat(count) if spec.by_turns else order.repeat_interleave(count)
        self._axes, self._device = axes.to(device), device
        self.of = lru_cache(MOST_SIZES)(self._of)

    @cached_property
    def _cos_sin(self) -> Tensor:
        """The table, made for the first tile: a dry build costs nothing."""
        spec = self._spec
        table = cos_sin_table(
            head_dim=self._head_dim // AXES,
            theta=spec.theta,
            scaling=None,
            num_positions=spec.first + spec.num_positions,
        )
        both = [
            half.repeat_interleave(AXES, 1) if spec.by_turns else half.repeat(1, AXES) for half in table.chunk(2, dim=1)
        ]
        return torch.cat(both, dim=1).to(self._device)

    def _of(self, grid: Grid) -> Rotation:
        rows, columns = (torch.arange(count) + self._spec.first for count in grid)
        positions = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)
        return Rotation(positions.to(self._device), self._cos_sin, self._axes)


def _norm(parts: Parts, name: str, width: int, eps: float, *, rms: bool) -> Callable[[Tensor], Tensor]:
    name = f"{parts.prefix}{name}"
    return build_norm(
        vector(f"{name}.weight", width) if rms else layer_norm_spec(name, width, bias=True), parts, eps
    ).of


def window_order(grid: Grid, side: int) -> tuple[Tensor, list[int]]:
    """Return the patches of a grid window by window, and those of a window row by row, [P] int64; and the number of
    patches of each window: `side` x `side`, and fewer at the right and at the bottom edge."""
    bands, places = (torch.arange(count) // side for count in grid)
    windows = (bands.unsqueeze(1) * (grid[1] // side + 1) + places).flatten()
    return torch.argsort(windows, stable=True), torch.unique(windows, return_counts=True)[1].tolist()


def _paired_rows(num_heads: int, head_dim: int) -> Rows:
    """Return the rows of queries, keys and values with the first of each pair of a head before all second ones."""
    rotated = 2 * num_heads * head_dim
    begins = [head + at for head in range(0, rotated, head_dim) for at in (0, 1)]
    pairs = (range(begin, begin - begin % head_dim + head_dim, 2) for begin in begins)
    return *pairs, range(rotated, rotated + num_heads * head_dim)


class RotaryBlock:
    """A layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: RotaryBlockSpec, parts: Parts) -> None:
        self._ops, self._heads, self._scale = parts.ops, spec.num_heads, spec.head_dim**-0.5
        width, inner = spec.hidden_size, spec.intermediate_size
        self._norms = [_norm(parts, name, width, spec.norm_eps, rms=spec.rms) for name in spec.names.norms]
        qkv = dict.fromkeys(spec.names.qkv, 3 * width // len(spec.names.qkv))
        rows = _paired_rows(spec.num_heads, spec.head_dim) if spec.neighbours else ()
        self._qkv = parts.linear(qkv, width, bias=True, rows=rows)
        self._out = parts.linear({spec.names.out: width}, width, bias=True)
        self._up = parts.linear({f"mlp.{name}": inner for name in spec.mlp.up}, width, bias=True)
        self._down = parts.linear({f"mlp.{spec.mlp.down}": width}, inner, bias=True)
        self._activate = spec.mlp.activation(parts.ops)

    def __call__(self, x: Tensor, tile: PagedKv, by: Rotation) -> Tensor:
        """x [P, h], which stays as it is -> [P, h]. `tile` says which patches attend to each other."""
        ops, (norm_attention, norm_mlp) = self._ops, self._norms
        q, k, v = self._qkv.of(norm_attention(x)).view(len(x), 3, self._heads, -1).unbind(1)
        ops.attention.apply_rope(q, k, by.positions, by.cos_sin, axes=by.axes)
        attended = ops.attention.paged_attention(q, KvCache(k, v), tile, scale=self._scale)
        x = ops.elementwise.add_(self._out.of(attended.flatten(1)), x)
        return ops.elementwise.add_(self._down.of(self._activate(self._up.of(norm_mlp(x)))), x)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergerSpec:
    """Squares of `factor` x `factor` patches through two layers with a GELU between them. In front is a LayerNorm of
    each patch, or with `norm_merged` of each square; with `rms` an RMS norm. `names` are those of the norm and of both
    layers."""

    name: str
    factor: int
    hidden_size: int
    output_size: int
    norm_eps: float
    norm_merged: bool = False
    rms: bool = False
    names: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")

    @property
    def equation(self) -> str:
        """Return what it computes of a token's patches, x."""
        norm, squares = "norm" if self.rms else "layernorm", f"{self.factor} x {self.factor} patches"
        return f"W2 gelu(W1 {norm}(x) of {squares} + b) + b"

    def build(self, parts: Parts) -> Merger:
        """Return the part with its weights."""
        return Merger(self, parts.within(self.name))


class Merger:
    """Patches to tokens, row by row."""

    def __init__(self, spec: MergerSpec, parts: Parts) -> None:
        self._ops, self._norm_merged = parts.ops, spec.norm_merged
        self._width = spec.factor**2 * spec.hidden_size
        normed = self._width if spec.norm_merged else spec.hidden_size
        norm, up, down = spec.names
        self._norm = _norm(parts, norm, normed, spec.norm_eps, rms=spec.rms)
        self._up = parts.linear({up: self._width}, self._width, bias=True)
        self._down = parts.linear({down: spec.output_size}, self._width, bias=True)
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """x [P, h] -> [P / s^2, H]."""
        normed = x if self._norm_merged else self._norm(x)
        merged = self._ops.drafting.gather_rows(normed, self._order(grid)).view(-1, self._width)
        merged = self._norm(merged) if self._norm_merged else merged
        return self._down.of(self._ops.elementwise.gelu(self._up.of(merged), exact=True))
