"""Attention of DeBERTa: the content of a token meets that of another, and the distance between them.

Shape letters: T tokens of all texts of a step, N tokens of one text, L longest text, R distances, H hidden size, Hq
heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from forebay.formats.quantized import ENCODER_BITS
from forebay.layers.build import Parts
from forebay.layers.norms import NormSpec, build_norm
from forebay.layers.segments import Distances, Segments
from forebay.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class DistancesSpec:
    """A table of 2 * `span` embeddings, those of distances from -span on, perhaps normed. With `far` > 0 distances
    above half of the span share a row by their logarithm, up to `far` (arXiv 2111.09543, section 2; the buckets are
    those of the published code of DeBERTa v2)."""

    name: str
    hidden_size: int
    span: int
    far: int = 0
    norm: NormSpec | None = None
    norm_eps: float = 0.0

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance: int64, from -span to span - 1."""
        if self.far:
            middle = self.span // 2
            size = distance.abs().clamp(min=middle)
            by_log = torch.log(size / middle) / torch.log(torch.tensor((self.far - 1) / middle)) * (middle - 1)
            distance = torch.where(distance.abs() <= middle, distance, (by_log.ceil() + middle) * distance.sign())
        return distance.long().clamp(min=-self.span, max=self.span - 1)

    def build(self, parts: Parts) -> DistanceTable:
        """Return the table with its weights."""
        return DistanceTable(self, parts)


class DistanceTable:
    """The embeddings of all distances. Its weights are read-only after loading."""

    def __init__(self, spec: DistancesSpec, parts: Parts) -> None:
        self._spec = spec
        self._table = parts.tensor(f"{spec.name}.weight", 2 * spec.span, spec.hidden_size)
        self._norm = (lambda x: x) if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps).of

    def up_to(self, longest: int) -> Distances:
        """Return the distances between the tokens of texts of `longest` tokens at most."""
        apart = torch.arange(1 - longest, longest, device=self._table.device)
        buckets = self._spec.bucket(apart) + self._spec.span
        first, last = int(buckets[0]), int(buckets[-1])
        return Distances(self._norm(self._table[first : last + 1]), buckets - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledAttentionSpec:
    """`names` are the checkpoint's of q, k and v. `of_distances` are those of the layers that project distances to keys
    and to queries; () for those of tokens."""

    names: tuple[str, str, str]
    output: str
    hidden_size: int
    num_heads: int
    head_dim: int
    of_distances: tuple[str, ...] = ()
    reach: int = 0

    @property
    def factor(self) -> float:
        """Return what scores are multiplied by: they have three terms."""
        return 1 / math.sqrt(3 * self.head_dim)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        wk, wq = ("Pk", "Pq") if self.of_distances else ("Wk", "Wq")
        yield f"attention(h) = Wo softmax({self.factor:.4g} (q·k + q·{wk} r + k·{wq} r)) v  over all tokens of the text"
        yield f"  q = Wq h, k = Wk h, v = Wv h; {self.num_heads} heads of {self.head_dim}; r = distance[i - j]"

    def build(self, parts: Parts) -> DisentangledAttention:
        """Return the part with its weights."""
        return DisentangledAttention(self, parts)


class DisentangledAttention:
    """Attention of each token over all tokens of its text (DeBERTa, arXiv 2006.03654, section 3.1), text by text in
    float32."""

    def __init__(self, spec: DisentangledAttentionSpec, parts: Parts) -> None:
        self._ops: Ops = parts.ops
        self._spec = spec
        width, q_and_k = spec.num_heads * spec.head_dim, spec.of_distances or spec.names[:2]
        sizes = {name: {name: width} for name in (*spec.names, *q_and_k)}
        each = {
            name: parts.linear(size, spec.hidden_size, bias=True, min_bits=ENCODER_BITS) for name, size in sizes.items()
        }
        self._q, self._k, self._v = (each[name] for name in spec.names)
        self._of_query, self._of_key = (each[name] for name in q_and_k)
        self._output = parts.linear({spec.output: spec.hidden_size}, width, bias=True)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H], which stays as it is -> [T, H] float32."""
        assert texts.distances is not None, "a model with this attention has a table of distances"
        q, k, v = (self._heads(layer.of(x)) for layer in (self._q, self._k, self._v))
        embeddings, row = texts.distances
        of_query, of_key = (self._heads(layer.of(embeddings)) for layer in (self._of_query, self._of_key))
        out, middle = torch.empty_like(x), len(row) // 2
        for first, end in pairwise(texts.tokens.q_start.tolist()):
            places = torch.arange(end - first, device=x.device)
            apart = row[middle + places.unsqueeze(1) - places].expand(len(q), -1, -1)
            queries, keys, values = (each[:, first:end] for each in (q, k, v))
            # [Hq, N, N], query by key: of a key the distance stands in its own row
            by_key = (keys @ of_query.transpose(1, 2)).gather(2, apart.transpose(1, 2)).transpose(1, 2)
            by_query = (queries @ of_key.transpose(1, 2)).gather(2, apart)
            scores = queries @ keys.transpose(1, 2) + by_query + by_key
            weights = (scores * self._spec.factor).softmax(dim=-1)
            out[first:end] = (weights @ values).transpose(0, 1).flatten(1).to(x.dtype)
        return self._output.of_f32(out)

    def _heads(self, x: Tensor) -> Tensor:
        """x [N, Hq * D] -> [Hq, N, D] float32."""
        return x.view(len(x), self._spec.num_heads, self._spec.head_dim).transpose(0, 1).float().contiguous()
