"""Decoder layers with several residual streams (hyper-connections, see `ops/reference/streams.py`).

Shape letters: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.blocks import SublayerSpec
from forebay.layers.build import Block, Parts
from forebay.layers.context import ForwardContext
from forebay.ops.reference.streams import Mixing


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsSpec:
    """`name` is how the names begin of the weights that join the streams behind the last layer, "" if they are joined
    by their mean; in layers those of a part have a beginning of their own. `norm_eps` is that of all norms, `eps` is
    added where something could be 0."""

    name: str
    hidden_size: int
    num_streams: int
    iterations: int
    norm_eps: float
    eps: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Streams:
        """Return the part with its weights."""
        return Streams(self, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSublayerSpec:
    """A part with a norm before it, and `mixing`, how the names of the weights begin that mix streams around it."""

    sublayer: SublayerSpec
    mixing: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSpec:
    """A decoder layer of several streams: one sublayer after the other."""

    sublayers: tuple[StreamedSublayerSpec, ...]
    streams: StreamsSpec
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Block:
        """Return the layer with its weights."""
        return StreamedBlock(self, parts)


class Streams:
    """All streams begin with the embedding, and are joined behind the last layer."""

    def __init__(self, spec: StreamsSpec, parts: Parts) -> None:
        self._ops, self._num_streams = parts.ops, spec.num_streams
        self._mixing = _mixing(spec, parts, spec.name, spec.num_streams, num_scales=1) if spec.name else None

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, N * H]."""
        return self._ops.elementwise.concat([x] * self._num_streams)

    def collapse(self, streams: Tensor) -> Tensor:
        """streams [T, N * H] -> [T, H]."""
        ops = self._ops
        if self._mixing is None:
            return ops.pictures.mean_rows(streams.view(-1, streams.shape[1] // self._num_streams), self._num_streams)
        weights = ops.streams.last_weights(streams, self._mixing)
        return ops.streams.collapse_streams(streams, weights)


class StreamedBlock:
    """A decoder layer: what a part is given is a mean of the streams, what it gives goes to each, and the streams are
    mixed."""

    def __init__(self, spec: StreamedSpec, parts: Parts) -> None:
        self._ops = parts.ops
        num_streams = spec.streams.num_streams
        self._sublayers = [
            (
                each.sublayer.build(parts, spec.streams.norm_eps),
                _mixing(spec.streams, parts, each.mixing, (2 + num_streams) * num_streams, num_scales=3),
            )
            for each in spec.sublayers
        ]

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        ops = self._ops
        for (part, before, _), mixing in self._sublayers:
            assert before is not None, "parts of several streams have a norm before them"
            streams = ops.elementwise.add_(residual, x)
            weights = ops.streams.mix_weights(streams, mixing)
            collapsed = ops.streams.collapse_streams(streams, weights.before)
            out = part(ctx, before.of(collapsed))
            ops.streams.mix_streams_(residual, weights.between)
            x = ops.streams.spread_streams(out, weights.behind)
        return x


def _mixing(spec: StreamsSpec, parts: Parts, name: str, num_weights: int, *, num_scales: int) -> Mixing:
    width = spec.num_streams * spec.hidden_size
    return Mixing(
        num_streams=spec.num_streams,
        fn=parts.tensor(f"{name}fn", num_weights, width, float32=True),
        scale=parts.tensor(f"{name}scale", num_scales, float32=True),
        base=parts.tensor(f"{name}base", num_weights, float32=True),
        norm_eps=spec.norm_eps,
        eps=spec.eps,
        iterations=spec.iterations,
    )
