"""Decoder layers: mixers and feed-forward layers around the residual stream, with norms before or after them.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import Block, Parts, PartSpec
from forebay.layers.context import ForwardContext
from forebay.layers.params import TensorParam


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerSpec:
    """x += after(part(before(x))): `before` and `after` are the weights of norms, None where there is none."""

    part: PartSpec
    before: TensorParam | None = None
    after: TensorParam | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualSpec:
    """One sublayer after the other, mostly a mixer and an MLP; what each adds is multiplied by `multiplier`. In the end
    the residual stream is multiplied by the weight `scale`, one number, "" for none."""

    sublayers: tuple[SublayerSpec, ...]
    norm_eps: float
    multiplier: float = 1.0
    scale: str = ""

    def build(self, parts: Parts) -> Block:
        return ResidualBlock(self, parts)


class ResidualBlock:
    def __init__(self, spec: ResidualSpec, parts: Parts) -> None:
        self._ops, self._eps, self._multiplier = parts.ops, spec.norm_eps, spec.multiplier
        self._scale = parts.number(spec.scale) if spec.scale else 1.0

        def norm(param: TensorParam | None) -> Tensor | None:
            return None if param is None else parts.weights.tensor(param)

        built = [sublayer.part.build(parts) for sublayer in spec.sublayers]
        both = zip(built, spec.sublayers, strict=True)
        self._sublayers = [(part, norm(sublayer.before), norm(sublayer.after)) for part, sublayer in both]

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops, eps = self._ops, self._eps
        for part, before, after in self._sublayers:
            x = part(ctx, ops.add_(residual, x) if before is None else ops.add_rms_norm(x, residual, before, eps))
            if after is not None:
                x = ops.rms_norm(x, after, eps)
            if self._multiplier != 1.0:
                ops.scale_(x, self._multiplier)
        if self._scale != 1.0:
            ops.scale_(residual, self._scale)
            ops.scale_(x, self._scale)
        return x
