"""Decoder layers: mixers and feed-forward layers around the residual stream, with norms before or after them.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from forebay.layers.build import Block, Part, Parts, PartSpec
from forebay.layers.context import ForwardContext
from forebay.layers.norms import Norm, NormSpec, build_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerSpec:
    """x += after(part(before(x))): `before` and `after` are norms, None if there is none. `after_eps` is the epsilon of
    `after`, None for that of the block."""

    part: PartSpec
    before: NormSpec | None = None
    after: NormSpec | None = None
    after_eps: float | None = None
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts, eps: float) -> Sublayer:
        """Return the part with its weights, and those of the norms, which have `eps` unless they have their own."""
        part = self.part.build(parts)  # first: random weights are drawn in the order in which they are asked for
        before = None if self.before is None else build_norm(self.before, parts, eps)
        after_eps = eps if self.after_eps is None else self.after_eps
        after = None if self.after is None else build_norm(self.after, parts, after_eps)
        return Sublayer(part, before, after)


class Sublayer(NamedTuple):
    """A part with the norms before and after it; None for no norm."""

    part: Part
    before: Norm | None
    after: Norm | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualSpec:
    """One sublayer after the other, mostly a mixer and an MLP; what each adds is multiplied by `multiplier`. In the end
    the residual stream is multiplied by the weight `scale`, one number, "" for none."""

    sublayers: tuple[SublayerSpec, ...]
    norm_eps: float
    multiplier: float = 1.0
    scale: str = ""
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Block:
        return ResidualBlock(self, parts)


class ResidualBlock:
    """A decoder layer: parts in sequence, each added to the residual stream."""

    def __init__(self, spec: ResidualSpec, parts: Parts) -> None:
        self._ops, self._multiplier = parts.ops, spec.multiplier
        self._scale = parts.number(spec.scale) if spec.scale else 1.0
        self._sublayers = [sublayer.build(parts, spec.norm_eps) for sublayer in spec.sublayers]

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        for part, before, after in self._sublayers:
            x = part(ctx, ops.elementwise.add_(residual, x) if before is None else before.of_sum(x, residual))
            if after is not None:
                x = after.of(x)
            if self._multiplier != 1.0:
                ops.elementwise.scale_(x, self._multiplier)
        if self._scale != 1.0:
            ops.elementwise.scale_(residual, self._scale)
            ops.elementwise.scale_(x, self._scale)
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchesSpec:
    """Side by side on the same input, each with norms of its own, as an MLP and experts; what they give is added."""

    sublayers: tuple[SublayerSpec, ...]
    norm_eps: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Branches:
        return Branches(self, parts)


class Branches:
    """Parts that read the same input in parallel, each with norms of its own; their outputs are added."""

    def __init__(self, spec: BranchesSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._sublayers = [sublayer.build(parts, spec.norm_eps) for sublayer in spec.sublayers]

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        first, *others = (apply(sublayer, ctx, x) for sublayer in self._sublayers)
        for other in others:
            self._ops.elementwise.add_(first, other)
        return first


def apply(sublayer: Sublayer, ctx: ForwardContext, x: Tensor) -> Tensor:
    """Return what a part gives between its norms, x [T, H] -> [T, H]."""
    part, before, after = sublayer
    x = part(ctx, x if before is None else before.of(x))
    return x if after is None else after.of(x)
