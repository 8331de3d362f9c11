"""Parts of InternViT: patches behind a token of the whole tile, and blocks whose outputs have a scale for each entry.

Shape letters: P patches of a tile, h the encoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forebay.base.pixels import CHANNELS
from forebay.layers.build import Parts
from forebay.layers.encoder import pixel_scale
from forebay.layers.linear import Linear
from forebay.layers.norms import NormSpec, build_norm, layer_norm_spec
from forebay.layers.params import vector
from forebay.ops.reference.attention import KvCache, PagedKv

_HEAD_EPS: Final = 1e-6  # of the norms of queries and keys, which no configuration has


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassPatchesSpec:
    """`side` x `side` patches of `size` pixels, each through a linear layer with a bias, behind a learned row of the
    tile, all with learned positions. Channels as in `PatchesSpec`."""

    name: str
    hidden_size: int
    size: int
    side: int
    rescale: float
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def equation(self) -> str:
        """Return what it computes of a patch."""
        count = f"{self.side**2:,} patches of {self.size} x {self.size} pixels"
        return f"x = W patch + b + position[patch], behind a learned x of the tile  (a tile has {count})"

    def build(self, parts: Parts) -> ClassPatches:
        """Return the part with its weights."""
        return ClassPatches(self, parts.within(self.name))


class ClassPatches:
    """A tile's pixels to patches. The convolution of the checkpoint is a linear layer: its stride is its size."""

    def __init__(self, spec: ClassPatchesSpec, parts: Parts) -> None:
        self._ops, self._size, self._dtype = parts.ops, spec.size, parts.weights.dtype
        self._device, width = parts.weights.device, spec.hidden_size
        name = "patch_embeddings.projection"
        kernel = parts.values(f"{name}.weight", width, CHANNELS, spec.size, spec.size)
        weight = parts.ops.linear.pack(kernel.view(width, -1), parts.values(f"{name}.bias", width))
        self._embedding = Linear(parts.ops, weight)
        self._first = parts.tensor("cls_token", 1, 1, width, change=lambda row: row.view(1, -1))
        self._positions = parts.tensor(
            "position_embeddings", 1, spec.side**2 + 1, width, change=lambda table: table.squeeze(0)
        )
        self._scale = pixel_scale(spec.rescale, spec.mean, spec.std, self._device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels uint8 [height, width, 3] -> [1 + P, h]."""
        rows = self._ops.pictures.patch_rows(pixels.to(self._device), self._size, self._scale, self._dtype)
        x = torch.cat([self._first, self._embedding.of(rows)])
        return self._ops.elementwise.add_(x, self._positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledBlockSpec:
    """Attention and a feed-forward layer, each behind a norm; each entry of what they give is multiplied by a weight.
    `bias`: of queries, keys and values, which have a norm over all heads with `head_norm`. `rms_norm`: norms are RMS
    norms, else LayerNorms."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    bias: bool
    head_norm: bool
    rms_norm: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def norm(self, name: str) -> NormSpec:
        """Describe the norm of this name."""
        stored = f"{self.name}.{name}"
        if self.rms_norm:
            return vector(f"{stored}.weight", self.hidden_size)
        return layer_norm_spec(stored, self.hidden_size, bias=True)

    def build(self, parts: Parts) -> ScaledBlock:
        """Return the block with its weights."""
        return ScaledBlock(self, parts)


class ScaledBlock:
    """A layer: x + s attention(norm(x)), then x + t mlp(norm(x)). Layer scale: CaiT, arXiv 2103.17239, section 3."""

    def __init__(self, spec: ScaledBlockSpec, parts: Parts) -> None:
        self._ops, self._heads, self._scale = parts.ops, spec.num_heads, spec.head_dim**-0.5
        width, inner = spec.hidden_size, spec.intermediate_size
        self._norms = [
            build_norm(spec.norm(f"layernorm_{place}"), parts, spec.norm_eps).of for place in ("before", "after")
        ]
        block = parts.within(spec.name)
        attention, mlp = block.within("attention"), block.within("mlp")
        self._qkv = attention.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), width, bias=spec.bias)
        self._out = attention.linear({"projection_layer": width}, width, bias=True)
        self._head_norms = [attention.tensor(f"{name}_norm.weight", width) for name in ("q", "k") if spec.head_norm]
        self._up = mlp.linear({"fc1": inner}, width, bias=True)
        self._down = mlp.linear({"fc2": width}, inner, bias=True)
        self._scales = [block.tensor(f"lambda_{i}", width) for i in (1, 2)]

    def __call__(self, x: Tensor, tile: PagedKv) -> Tensor:
        """x [1 + P, h], which stays as it is -> [1 + P, h]. `tile` says which rows attend to each other."""
        ops, (norm_attention, norm_mlp), (of_attention, of_mlp) = self._ops, self._norms, self._scales
        q, k, v = self._qkv.of(norm_attention(x)).chunk(3, dim=1)
        if self._head_norms:
            q, k = (
                ops.norms.rms_norm(part, weight, _HEAD_EPS)
                for part, weight in zip((q, k), self._head_norms, strict=True)
            )
        q, k, v = (part.reshape(len(x), self._heads, -1) for part in (q, k, v))
        attended = ops.attention.paged_attention(q, KvCache(k, v), tile, scale=self._scale)
        x = ops.elementwise.add_(self._out.of(attended.flatten(1)) * of_attention, x)
        inner = ops.elementwise.gelu(self._up.of(norm_mlp(x)), exact=True)
        return ops.elementwise.add_(self._down.of(inner) * of_mlp, x)
