"""Parts of gemma4_unified for pictures: a token is made of its own pixels, without attention.

Shape letters: P patches of a tile, row by row, each a token; h the part's width, H the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale
from forebay.layers.grid_encoder import Grid
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm, layer_norm_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedPatchesSpec:
    """Patches of `size` pixels, whose numbers are normed with `norm_eps`. A channel's value is multiplied by `rescale`,
    and then has `mean` and the deviation `std`."""

    name: str
    size: int
    norm_eps: float
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def build(self, parts: Parts) -> NormedPatches:
        """Return the part with its weights."""
        return NormedPatches(self, parts.within(self.name))


class NormedPatches:
    """A tile's pixels to patches."""

    def __init__(self, spec: NormedPatchesSpec, parts: Parts) -> None:
        self._ops, self._size, self._device = parts.ops, spec.size, parts.weights.device
        self._dtype = parts.weights.dtype
        count = spec.size**2 * CHANNELS
        weight, bias = (parts.tensor(f"patch_ln1.{kind}", count, change=by_channel) for kind in ("weight", "bias"))
        self._norm = partial(parts.ops.norms.layer_norm, weight=weight, bias=bias, eps=spec.norm_eps)
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Grid]:
        """pixels uint8 [height, width, 3] -> [P, 3 * size * size], and the rows and columns of patches."""
        grid = pixels.shape[0] // self._size, pixels.shape[1] // self._size
        patches = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        return self._norm(patches), grid


def by_channel(values: Tensor) -> Tensor:
    """Return numbers of a patch's pixels by channel: files have them pixel by pixel. [..., size * size * 3]"""
    shape = values.shape
    return values.view(*shape[:-1], -1, CHANNELS).transpose(-1, -2).reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPatchesSpec:
    """A linear layer over a patch's numbers and a norm. Then two learned positions are added, those of the column and
    of the row, of which there are `num_positions` each. Another norm follows."""

    name: str
    num_inputs: int
    hidden_size: int
    num_positions: int
    norm_eps: float

    def build(self, parts: Parts) -> PlacedPatches:
        """Return the part with its weights."""
        return PlacedPatches(self, parts.within(self.name))


class PlacedPatches:
    """Numbers of patches to the width of the part."""

    def __init__(self, spec: PlacedPatchesSpec, parts: Parts) -> None:
        self._ops, width = parts.ops, spec.hidden_size
        by_pixel = parts.values("patch_dense.weight", width, spec.num_inputs)
        bias = parts.values("patch_dense.bias", width)
        self._dense = Linear(parts.ops, parts.ops.linear.pack(by_channel(by_pixel), bias))
        self._before, self._behind = (
            build_norm(layer_norm_spec(f"{parts.prefix}{name}", width, bias=True), parts, spec.norm_eps).of
            for name in ("patch_ln2", "pos_norm")
        )
        self._positions = parts.tensor("pos_embedding", spec.num_positions, 2, width)

    def __call__(self, patches: Tensor, grid: Grid) -> Tensor:
        """patches [P, K] of a grid -> [P, h]."""
        rows, columns = grid
        positions = (self._positions[:rows, 1].unsqueeze(1) + self._positions[:columns, 0]).flatten(0, 1)
        return self._behind(self._ops.elementwise.add_(self._before(self._dense.of(patches)), positions))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedSpec:
    """An RMS norm without a weight, and one linear layer without a bias."""

    name: str
    hidden_size: int
    output_size: int
    norm_eps: float

    def build(self, parts: Parts) -> Projected:
        """Return the part with its weights."""
        return Projected(self, parts.within(self.name))


class Projected:
    """Patches to tokens."""

    def __init__(self, spec: ProjectedSpec, parts: Parts) -> None:
        self._norm = partial(parts.ops.norms.rms_norm, weight=parts.ones(spec.hidden_size), eps=spec.norm_eps)
        self._projection = parts.linear({"embedding_projection": spec.output_size}, spec.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, h] -> [P, H]."""
        return self._projection.of(self._norm(x))
