"""Parts of MoonViT, the encoder of Kimi K2.5: patches with positions from a table, and the projector.

Shape letters: P patches of a tile, h the encoder's hidden size, H the language model's, s patches to an edge of what
becomes one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale
from forebay.layers.grid_encoder import Grid, Merger, MergerSpec, cubic_taps, interpolated
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm, layer_norm_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class MoonPatchesSpec:
    """Patches of `size` pixels, each through a linear layer with a bias. A table of `side` x `side` positions is
    interpolated to the patches. Channels as of `PatchesSpec`."""

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
            f"x = W patch + b + position[row, column]  (patches of {self.size} x {self.size} pixels)\n"
            f"  position: {self.side} x {self.side} learned ones, interpolated to the rows and columns of the image"
        )

    def build(self, parts: Parts) -> MoonPatches:
        """Return the part with its weights."""
        return MoonPatches(self, parts.within(self.name))


class MoonPatches:
    """A tile's pixels to patches (arXiv 2504.07491, section 2.1)."""

    def __init__(self, spec: MoonPatchesSpec, parts: Parts) -> None:
        self._ops, self._spec, self._dtype = parts.ops, spec, parts.weights.dtype
        self._device, width, size = parts.weights.device, spec.hidden_size, spec.size
        kernel = parts.values("proj.weight", width, CHANNELS, size, size).view(width, -1)
        self._embedding = Linear(parts.ops, parts.ops.linear.pack(kernel, parts.values("proj.bias", width)))
        by_row = parts.tensor("pos_emb.weight", spec.side, spec.side, width)
        self._positions = by_row.view(-1, width)
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """pixels uint8 [height, width, 3] -> [P, h], and the rows and columns of patches."""
        size = self._spec.size
        grid = pixels.shape[0] // size, pixels.shape[1] // size
        x = self._ops.pictures.patch_rows(pixels.to(self._device), size, self._scale, self._dtype)
        rows, columns = (cubic_taps(count, self._spec.side) for count in grid)
        return self._ops.elementwise.add_(self._embedding.of(x), interpolated(self._positions, rows, columns)), grid


@dataclass(frozen=True, kw_only=True, slots=True)
class MoonProjectorSpec:
    """The LayerNorm `norm` behind the last layer, and a merger of patches."""

    norm: str
    norm_eps: float
    merger: MergerSpec

    @property
    def output_size(self) -> int:
        """Return the numbers of a token."""
        return self.merger.output_size

    @property
    def equation(self) -> str:
        """Return what it computes of a token's patches, x."""
        return self.merger.equation.replace("(x)", "(layernorm(x))")

    def build(self, parts: Parts) -> MoonProjector:
        """Return the part with its weights."""
        return MoonProjector(self, parts)


class MoonProjector:
    """Patches to tokens, row by row."""

    def __init__(self, spec: MoonProjectorSpec, parts: Parts) -> None:
        norm = layer_norm_spec(f"{parts.prefix}{spec.norm}", spec.merger.hidden_size, bias=True)
        self._norm = build_norm(norm, parts, spec.norm_eps).of
        self._merge: Merger = spec.merger.build(parts)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """x [P, h] -> [P / s^2, H]."""
        return self._merge(self._norm(x), grid)
