"""The facts that a layer may use about the step it runs in. No ambient state: this is an argument. T is the number of
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from forebay.layers.selection import Selection
from forebay.memory.kv_allocator import KV
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.compression import Blocks, Compression
from forebay.pools.cache_pool import CachePool


@dataclass(slots=True)
class Carried:
    """Results of a layer for the layers behind it. `selection`: the tokens that the last indexer selected. `blocks`:
    those that the step ends, by how they are compressed."""

    selection: Selection | None = None
    blocks: dict[Compression, Blocks] = field(default_factory=dict)


class PictureRows(NamedTuple):
    """Encodings of pictures, `table` [R, n * H] with a padding row 0, and which of them each token takes, `rows` [T]
    int32, 0 for none. The first H numbers are taken instead of its id's embedding. As many are added to the residual
    stream behind each of the first n - 1 layers (DeepStack, arXiv 2406.04334). `ahead` [T] int32 are the positions
    behind a token's own up to its picture's end; None where attention within pictures is causal."""

    table: Tensor
    rows: Tensor
    ahead: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """The tokens of all sequences, one sequence after the other.

    A sequence's positions are contiguous and end with its length; attention is causal. `kinds` has, by the name of a
    kind of cache, the step's input for the layers that keep that kind: a `PagedKv` for kinds with pages (full KV among
    them), else the type that the kind's own folder declares. `per_layer` is the further input of each of L layers for
    each token, side by side, in models that have such inputs. `input_ids` are for the model's own layers: those that
    choose experts by them read them there. `adapters` is the slot of each token's adapter, 0 for none; None if no token
    has one. `pictures` is None if no token is of a picture. `rope_positions` are those that a model with M-RoPE rotates
    by, None for any other model: KV and causality are by `positions`.
    """

    positions: Tensor  # [T] int64
    rope_positions: Tensor | None = None  # [3, T] int64
    kinds: Mapping[str, Any]
    cache: CachePool
    per_layer: Tensor | None = None  # [T, L * P]
    input_ids: Tensor | None = None  # [T] int64
    adapters: Tensor | None = None  # [T] int32
    pictures: PictureRows | None = None
    carried: Carried = field(default_factory=Carried)

    def rotated_by(self, axes: Tensor | None) -> Tensor:
        """Return the positions that layers rotate by: [T], or [3, T] with the `axes` of M-RoPE."""
        if axes is None:
            return self.positions
        assert self.rope_positions is not None, "a step of a model with M-RoPE has three positions"
        return self.rope_positions

    @property
    def full(self) -> PagedKv:
        """The pages of layers that keep all tokens."""
        return self.pages(KV)

    def pages(self, kind: str) -> PagedKv:
        """Return the pages of layers that keep this kind of cache. KeyError for a kind that the cache does not have."""
        pages: PagedKv = self.kinds[kind]
        return pages
