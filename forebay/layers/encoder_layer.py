"""Layer of a text encoder: attention and a feed-forward part, with their norms.

Shape letters: T tokens of all texts of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.encoder_mlp import EncoderMlpSpec
from forebay.layers.norms import NormSpec, build_norm, norm_name
from forebay.layers.segments import Segments

_Sublayer = Callable[[Tensor, Segments], Tensor]


class AttentionPartSpec(Protocol):
    """The attention of a layer. `reach`: tokens to each side that a token sees, 0 for all of the text."""

    @property
    def reach(self) -> int: ...
    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        ...

    def build(self, parts: Parts) -> _Sublayer:
        """Return the part with its weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerSpec:
    """Attention and a feed-forward part, each with a norm behind the sum with its input, or with `norm_first` in front
    of itself; None for no norm. `inner_norms` are those behind each part, before the sum."""

    attention: AttentionPartSpec
    mlp: EncoderMlpSpec
    norms: tuple[NormSpec | None, NormSpec | None]
    norm_eps: float
    norm_first: bool = False
    inner_norms: tuple[NormSpec, NormSpec] | None = None

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        mlp = self.mlp
        inner = f"{mlp.activation}(Wg h) Wu h" if mlp.gate else f"{mlp.activation}(Wu h)"
        for part, norm in zip(("attention", "mlp"), self.norms, strict=True):
            inner_x = "x" if norm is None else f"{norm_name(norm)}(x)"
            result = f"{part}({inner_x})" if self.inner_norms is None else f"{norm_name(norm)}({part}({inner_x}))"
            yield f"x += {result}" if self.norm_first else f"x = layernorm(x + {part}(x))"
        yield from self.attention.equations()
        yield f"mlp(h) = Wd {inner}  of {mlp.intermediate_size:,}"

    def build(self, parts: Parts) -> EncoderLayer:
        """Return the layer with its weights."""
        return EncoderLayer(self, parts)


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + mlp(x)): Attention Is All You Need, arXiv 1706.03762, section 3.1. Or x +
    attention(norm(x)), then x + mlp(norm(x)).

    x and the norms are in float32: rounded to bfloat16 behind each part, vectors of all-MiniLM-L6-v2 lose four times as
    much (docs/benchmarks.md). Only the inputs of products have the dtype of the weights."""

    def __init__(self, spec: EncoderLayerSpec, parts: Parts) -> None:
        self._ops, self._dtype, self._norm_first = parts.ops.elementwise, parts.weights.dtype, spec.norm_first
        norms = (_norm_of(norm, parts, spec.norm_eps) for norm in spec.norms)
        self._attention, self._mlp = spec.attention.build(parts), spec.mlp.build(parts)
        inner = (_norm_of(norm, parts, spec.norm_eps) for norm in spec.inner_norms or (None, None))
        sublayers: tuple[_Sublayer, _Sublayer] = (self._attention, self._each)
        self._sublayers = tuple(zip(sublayers, norms, inner, strict=True))

    def _each(self, x: Tensor, texts: Segments) -> Tensor:
        return self._mlp(x)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H] float32 -> [T, H] float32."""
        ops, dtype = self._ops, self._dtype
        for part, norm, inner in self._sublayers:
            if self._norm_first:
                x = ops.add_(inner(part(ops.narrow(norm(x), dtype), texts)), x)
            else:
                x = norm(ops.add_(part(ops.narrow(x, dtype), texts), x))
        return x


def _norm_of(norm: NormSpec | None, parts: Parts, eps: float) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if norm is None else build_norm(norm, parts, eps, float32=True).of
