"""Parts of Muse Glimmer's encoder: patches with positions from a table, and the adapter of squares of patches.

Shape letters: P patches of a tile, h the encoder's hidden size, H the language model's, s patches to an edge of what
becomes one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale, square_orders
from forebay.layers.grid_encoder import Grid, interpolated, linear_taps
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm, layer_norm_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class MusePatchesSpec:
    """Patches of `size` pixels, each through a linear layer, whose kernel sees an image `depth` times. A table of
    `side` x `side` positions is interpolated to the patches, and the LayerNorm `norm` follows. Channels as of
    `PatchesSpec`."""

    name: str
    norm: str
    hidden_size: int
    size: int
    depth: int
    side: int
    norm_eps: float
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def equation(self) -> str:
        """Return what it computes of a patch."""
        return (
            f"x = layernorm(W patch + position[column, row])  (patches of {self.size} x {self.size} pixels)\n"
            f"  position: {self.side} x {self.side} learned ones, interpolated to the columns and rows of the image"
        )

    def build(self, parts: Parts) -> MusePatches:
        """Return the part with its weights."""
        return MusePatches(self, parts)


class MusePatches:
    """A tile's pixels to patches. All frames that a kernel sees are the image, so its weights for them are summed."""

    def __init__(self, spec: MusePatchesSpec, parts: Parts) -> None:
        self._ops, self._spec, self._dtype = parts.ops, spec, parts.weights.dtype
        self._device, width, size = parts.weights.device, spec.hidden_size, spec.size
        own = parts.within(spec.name)
        kernel = own.values("patch_embedding.weight", width, spec.depth * CHANNELS * size**2)
        summed = kernel.float().view(width, spec.depth, -1).sum(1).to(kernel.dtype)
        self._embedding = Linear(parts.ops, parts.ops.linear.pack(summed))
        self._positions = own.tensor("position_embedding_table.weight", spec.side**2, width)
        norm = layer_norm_spec(f"{parts.prefix}{spec.norm}", width, bias=True)
        self._norm = build_norm(norm, parts, spec.norm_eps).of
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """pixels uint8 [height, width, 3] -> [P, h], and the rows and columns of patches.

        The positions of a grid with rows and columns exchanged are added in their order, as the model was trained.
        """
        size, side = self._spec.size, self._spec.side
        grid = pixels.shape[0] // size, pixels.shape[1] // size
        x = self._ops.pictures.patch_rows(pixels.to(self._device), size, self._scale, self._dtype)
        rows, columns = (linear_taps(count, side) for count in reversed(grid))
        x = self._ops.elementwise.add_(self._embedding.of(x), interpolated(self._positions, rows, columns))
        return self._norm(x), grid


@dataclass(frozen=True, kw_only=True, slots=True)
class MuseAdapterSpec:
    """The LayerNorm `norm`, squares of `factor` x `factor` patches through two layers with a GELU behind each, and one
    more with an RMS norm without a weight behind it. No layer has a bias."""

    norm: str
    adapter: str
    projection: str
    factor: int
    hidden_size: int
    inner_size: int
    output_size: int
    norm_eps: float
    output_eps: float

    @property
    def equation(self) -> str:
        """Return what it computes of a token's patches, x."""
        return f"norm(W3 gelu(W2 gelu(W1 layernorm(x) of {self.factor} x {self.factor} patches)))"

    def build(self, parts: Parts) -> MuseAdapter:
        """Return the part with its weights."""
        return MuseAdapter(self, parts)


class MuseAdapter:
    """Patches to tokens, row by row."""

    def __init__(self, spec: MuseAdapterSpec, parts: Parts) -> None:
        own, width, size = parts.within(spec.adapter), spec.hidden_size, spec.factor**2
        self._ops, self._width, self._eps = parts.ops, size * width, spec.output_eps
        norm = layer_norm_spec(f"{parts.prefix}{spec.norm}", width, bias=True)
        self._norm = build_norm(norm, parts, spec.norm_eps).of
        by_channel = own.values("fc1.weight", spec.inner_size, size * width)
        by_patch = by_channel.view(-1, width, size).transpose(1, 2).reshape(spec.inner_size, -1)
        self._layers = (
            Linear(parts.ops, parts.ops.linear.pack(by_patch)),
            own.linear({"fc2": spec.inner_size}, spec.inner_size),
        )
        self._project = parts.linear({spec.projection: spec.output_size}, spec.inner_size)
        self._ones = parts.ones(spec.output_size)
        self._order = square_orders(spec.factor, parts.weights.device)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """x [P, h] -> [P / s^2, H]."""
        x = self._ops.drafting.gather_rows(self._norm(x), self._order(grid)).view(-1, self._width)
        for layer in self._layers:
            x = self._ops.elementwise.gelu(layer.of(x), exact=True)
        return self._ops.norms.rms_norm(self._project.of(x), self._ones, self._eps)
