"""Decoder layers with alternating updates (AltUp, arXiv 2301.13310): of several streams a layer computes with one, and
predicts and corrects the others by what that one becomes. As Gemma 3n has them, with a learned low-rank residual
(LAuReL, arXiv 2411.07501) beside attention, and an input of each layer's own.

Shape letters: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from forebay.layers.blocks import SublayerSpec, apply
from forebay.layers.build import Block, Parts
from forebay.layers.context import ForwardContext
from forebay.layers.embedding import PerLayerGateSpec
from forebay.layers.linear import Linear
from forebay.layers.norms import build_norm
from forebay.layers.params import TensorParam, unchanged
from forebay.ops import Ops

_LEAST: Final = 1e-5  # mean square of what a projection gives, before it is made as large as the first stream


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpSpec:
    """Streams beside the embedding are made of it by projections, `spread`, and joined by others, `collapse`, behind
    the last layer, under these names and a number. `active` is the stream that layers compute with."""

    hidden_size: int
    num_streams: int
    active: int
    norm_eps: float
    spread: str
    collapse: str
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> AltUpStreams:
        """Return the part with its weights."""
        return AltUpStreams(self, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaurelSpec:
    """h + norm(W2 W1 h), W1 to `rank` entries."""

    name: str
    hidden_size: int
    rank: int
    norm_eps: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Laurel:
        """Return the part with its weights."""
        return Laurel(self, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpBlockSpec:
    """A decoder layer. `mixer` and `mlp` stand between norms, and so does `gate`, of what the corrected active stream
    gives to the others; its input is multiplied by a weight of the layer if it is `scaled`."""

    name: str
    streams: AltUpSpec
    mixer: SublayerSpec
    mlp: SublayerSpec
    laurel: LaurelSpec
    gate: PerLayerGateSpec
    gate_norm: TensorParam
    scaled: bool
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Block:
        """Return the layer with its weights."""
        return AltUpBlock(self, parts)


class AltUpStreams:
    """The streams before the first layer and behind the last one."""

    def __init__(self, spec: AltUpSpec, parts: Parts) -> None:
        self._ops, self._size = parts.ops, spec.hidden_size
        bare = parts.without_adapters
        spread, collapse = (
            [bare.linear({f"{name}.{i}": self._size}, self._size) for i in range(spec.num_streams - 1)]
            for name in (spec.spread, spec.collapse)
        )
        self._spread, self._collapse = spread, collapse

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, N * H]: itself, and its projections, made as large."""
        match = self._ops.norms.match_rms
        return self._ops.elementwise.concat([x, *(match(each.of(x), x, _LEAST) for each in self._spread)])

    def collapse(self, streams: Tensor) -> Tensor:
        """streams [T, N * H] -> [T, H], the mean of the first and of projections of the others, made as large."""
        ops = self._ops
        first, *others = torch.split(streams, self._size, dim=1)
        result = ops.elementwise.concat([first])
        for stream, project in zip(others, self._collapse, strict=True):
            projected = project.of(ops.elementwise.concat([stream]))
            ops.elementwise.add_(result, ops.norms.match_rms(projected, first, _LEAST))
        return ops.elementwise.scale_(result, 1.0 / (1 + len(others)))


class Laurel:
    """Learned low-rank residual of one layer."""

    def __init__(self, spec: LaurelSpec, parts: Parts) -> None:
        parts, self._ops, self._eps = parts.within(spec.name), parts.ops, spec.norm_eps
        self._left = parts.linear({"linear_left": spec.rank}, spec.hidden_size)
        self._right = parts.linear({"linear_right": spec.hidden_size}, spec.rank)
        self._norm = parts.tensor("post_laurel_norm.weight", spec.hidden_size)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        projected = self._right(ctx, self._left(ctx, x))
        return self._ops.elementwise.add_(self._ops.norms.rms_norm(projected, self._norm, self._eps), x)


class Coefficients(NamedTuple):
    """How much of each stream goes to each, and how much of what the active one has gained, by a few numbers of that
    stream. The weights are float32."""

    ops: Ops
    norm: Tensor
    eps: float
    router: Linear
    between: Linear
    behind: Linear

    def of(self, x: Tensor, layer: Linear) -> Tensor:
        """x [T, H], the active stream -> the outputs of the `layer`, float32."""
        ops = self.ops
        normed = ops.norms.rms_norm(x, self.norm, self.eps)
        routed = ops.linear.apply_f32(normed, self.router.weight)
        ops.elementwise.scale_(routed, 1.0 / x.shape[1])
        return layer.of(ops.elementwise.softcap_(routed, 1.0))


class AltUpBlock:
    """A decoder layer that computes with one of several streams."""

    def __init__(self, spec: AltUpBlockSpec, parts: Parts) -> None:
        self._ops, streams = parts.ops, spec.streams
        self._num_streams = streams.num_streams
        self._active = slice(streams.active * streams.hidden_size, (streams.active + 1) * streams.hidden_size)
        self._coefficients = _coefficients(streams, parts.within(f"{spec.name}.altup"))
        self._laurel = spec.laurel.build(parts)
        self._mixer, self._mlp = (each.build(parts, streams.norm_eps) for each in (spec.mixer, spec.mlp))
        scale = parts.within(f"{spec.name}.altup").tensor("correct_output_scale", streams.hidden_size)
        self._scale = scale if spec.scaled else None
        self._gate = spec.gate.build(parts)
        self._gate_norm = build_norm(spec.gate_norm, parts, streams.norm_eps)

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        """x and residual [T, N * H]: the streams are their sum, before and behind the layer."""
        ops, coefficients = self._ops.elementwise, self._coefficients
        streams = ops.add_(residual, x)
        between = coefficients.of(streams[:, self._active], coefficients.between)
        self._ops.streams.mix_streams_(streams, between.view(-1, self._num_streams, self._num_streams))
        predicted = streams[:, self._active]
        activated = self._computed(ctx, predicted)
        gained = ops.add_(ops.scale_(ops.concat([predicted]), -1.0), activated)
        x = self._ops.streams.spread_streams(gained, coefficients.of(activated, coefficients.behind))
        corrected = ops.add_(ops.concat([predicted]), x[:, self._active])
        if self._scale is not None:
            corrected = ops.mul(corrected, self._scale.expand(len(x), -1))
        given = self._gate_norm.of(self._gate(ctx, corrected))
        return ops.add_(x, ops.concat([ops.zeros_like(given), *([given] * (self._num_streams - 1))]))

    def _computed(self, ctx: ForwardContext, predicted: Tensor) -> Tensor:
        """predicted [T, H] -> [T, H]: attention beside LAuReL, and the MLP."""
        ops = self._ops.elementwise
        attention, before, after = self._mixer
        assert before is not None, "attention without a norm before it"
        assert after is not None, "attention without a norm behind it"
        normed = before.of(predicted)
        x = ops.add_(after.of(attention(ctx, normed)), predicted)
        x = ops.scale_(ops.add_(x, self._laurel(ctx, normed)), 2**-0.5)
        return ops.add_(apply(self._mlp, ctx, x), x)


def _coefficients(spec: AltUpSpec, parts: Parts) -> Coefficients:
    """Load the coefficients: each stream has itself as well, and all of what the active one has gained."""
    n, bare = spec.num_streams, parts.without_adapters

    def by_source(rows: Tensor) -> Tensor:
        """From [to, from] to [from, to], which is how streams are mixed."""
        return rows.view(n, n, n).transpose(0, 1).reshape(n * n, n).contiguous()

    def packed(name: str, outputs: int, bias: Tensor, *, turned: bool) -> Linear:
        change = by_source if turned else unchanged
        values = parts.tensor(f"{name}.weight", outputs, n, float32=True, change=change)
        return Linear(parts.ops, parts.ops.linear.pack(values, bias, inputs=torch.float32))

    return Coefficients(
        ops=parts.ops,
        norm=parts.tensor("router_norm.weight", spec.hidden_size),
        eps=spec.norm_eps,
        router=bare.linear({"modality_router": n}, spec.hidden_size, min_bits=16),
        between=packed("prediction_coefs", n * n, torch.eye(n).flatten(), turned=True),
        behind=packed("correction_coefs", n, torch.ones(n), turned=False),
    )
