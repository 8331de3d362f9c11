"""Embeddings of a text encoder's tokens.

Shape letters: T tokens of all texts of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.embedding import embedding_table, lookup
from forebay.layers.norms import NormSpec, build_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEmbeddingsSpec:
    """The sum of a token's embeddings, normed: of its id, multiplied by `scale`, of its place in the text, and of its
    kind.

    `positions` is the table's name, of which the rows from `offset` on count; "" for none, as is `types`. The id of a
    token of kind t is its own plus t * vocab_size.
    """

    words: str
    vocab_size: int
    hidden_size: int
    positions: str = ""
    num_positions: int = 0
    offset: int = 0
    types: str = ""
    num_types: int = 0
    norm: NormSpec | None = None
    norm_eps: float = 1e-12
    scale: float = 1.0

    @property
    def equation(self) -> str:
        """Return what it computes of a token."""
        places = " + position[place]" if self.positions else ""
        kinds = " + type[kind]" if self.types else ""
        factor = "" if self.scale == 1.0 else f"{self.scale:.4g} "
        total = f"{factor}embedding[token]{kinds}{places}"
        whole = total if self.norm is None else f"layernorm({total})"
        return f"x = {whole}  ({self.vocab_size:,} x {self.hidden_size:,})"

    def build(self, parts: Parts) -> TextEmbeddings:
        """Return the part with its weights."""
        return TextEmbeddings(self, parts)


class TextEmbeddings:
    """BERT, arXiv 1810.04805, section 3: input representation."""

    def __init__(self, spec: TextEmbeddingsSpec, parts: Parts) -> None:
        self._ops, self._vocab_size, self._scale = parts.ops, spec.vocab_size, spec.scale
        width, dtype = spec.hidden_size, torch.float32
        table = embedding_table(f"{spec.words}.weight", spec.vocab_size, width)
        self._words = lookup(parts, parts.weights.table(table), dtype)
        self._positions: Callable[[Tensor], Tensor] | None = None
        self._types: Callable[[Tensor], Tensor] | None = None
        if spec.positions:
            rows = spec.num_positions + spec.offset
            places = parts.tensor(f"{spec.positions}.weight", rows, width, change=lambda table: table[spec.offset :])
            self._positions = partial(parts.ops.linear.embedding, table=places, dtype=dtype)
        if spec.types:
            kinds = parts.tensor(f"{spec.types}.weight", spec.num_types, width)
            self._types = partial(parts.ops.linear.embedding, table=kinds, dtype=dtype)
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps, float32=True).of

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions [T] int64 -> [T, H] float32."""
        ops = self._ops
        if self._types is None:
            x = self._words(input_ids)
        else:
            x = ops.elementwise.add_(
                self._words(input_ids % self._vocab_size), self._types(input_ids // self._vocab_size)
            )
        if self._scale != 1.0:
            x = ops.elementwise.scale_(x, self._scale)
        if self._positions is not None:
            x = ops.elementwise.add_(x, self._positions(positions))
        return x if self._norm is None else self._norm(x)
