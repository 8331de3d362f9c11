"""Parts that work side by side on the same input, and whose outputs are added.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import Parts, PartSpec
from forebay.layers.context import ForwardContext


@dataclass(frozen=True, kw_only=True, slots=True)
class SumSpec:
    """first(x) + second(x)."""

    first: PartSpec
    second: PartSpec
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Sum:
        return Sum(self, parts)


class Sum:
    """Two parts on the same input, whose outputs are added."""

    def __init__(self, spec: SumSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._first = spec.first.build(parts)
        self._second = spec.second.build(parts)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._ops.elementwise.add_(self._first(ctx, x), self._second(ctx, x))
