"""Decoder layers with several residual streams that gates read and write, and no matrix mixes.

Qwen 4; checked against transformers' `qwen4_exp`.

Shape letters: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from forebay.families.base.mixers import GatedStreams
from forebay.layers.build import Block, Part, Parts, PartSpec
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.ngrams import NgramInputsSpec
from forebay.layers.norms import normed_streams, norms_of_streams


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedStreamsSpec:
    """`name` is the checkpoint's prefix of the weights that join the streams behind the last layer; in layers those of
    a part have a prefix of their own. `norm_offset` is added to the weights of norms."""

    name: str
    hidden_size: int
    streams: GatedStreams
    norm_eps: float
    norm_offset: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> JoinedStreams:
        """Return the part with its weights."""
        return JoinedStreams(self, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedSublayerSpec:
    """A part, and `gates`, the checkpoint's prefix of the weights by which it reads and writes streams."""

    part: PartSpec
    gates: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedStreamsBlockSpec:
    """A decoder layer of several streams: one sublayer after the other. `ngrams` add to the streams before the first;
    None for nothing."""

    sublayers: tuple[GatedSublayerSpec, ...]
    streams: GatedStreamsSpec
    ngrams: NgramInputsSpec | None = None
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Block:
        """Return the layer with its weights."""
        return GatedStreamsBlock(self, parts)


class Reader:
    """Makes a part's input of the streams: the mean of their norms, each entry of which has a gate in low rank."""

    def __init__(self, name: str, spec: GatedStreamsSpec, parts: Parts) -> None:
        self.parts = parts = parts.within(name).without_adapters
        self._ops, self._eps, self._number = parts.ops, spec.norm_eps, spec.streams.number
        self.width = self._number * spec.hidden_size
        rank = spec.streams.rank
        self._norms = norms_of_streams(parts, "hc_norm", spec.hidden_size, self._number, spec.norm_offset)
        self._down = parts.linear({"input_mix_weight_down": rank}, self.width, input_scale=1 / self._number)
        self._up = parts.linear({"input_mix_weight_up": self.width}, rank)

    def normed(self, streams: Tensor) -> Tensor:
        """streams [T, N * H] -> their norms, [T, N * H]."""
        return normed_streams(self._ops, streams, self._norms, self._eps)

    def mean(self, normed: Tensor) -> Tensor:
        """normed [T, N * H] -> the part's input, [T, H]."""
        elementwise = self._ops.elementwise
        down = self._down.of(normed)
        gates = self._up.of(elementwise.mul_sigmoid(down, down))
        opened = elementwise.mul_sigmoid(normed, gates)
        return self._ops.pictures.mean_rows(opened.view(-1, self.width // self._number), self._number)


class JoinedStreams:
    """All streams begin with the embedding, and are joined behind the last layer."""

    def __init__(self, spec: GatedStreamsSpec, parts: Parts) -> None:
        self._ops, self._number = parts.ops, spec.streams.number
        self._reader = Reader(spec.name, spec, parts)

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, N * H]."""
        return self._ops.elementwise.concat([x] * self._number)

    def collapse(self, streams: Tensor) -> Tensor:
        """streams [T, N * H] -> [T, H]."""
        return self._reader.mean(self._reader.normed(streams))


class _Sublayer(NamedTuple):
    part: Part
    reader: Reader
    writer: Linear


class GatedStreamsBlock:
    """A decoder layer: a part is given a gated mean of the streams, and what it gives goes to each by a gate of its
    own."""

    def __init__(self, spec: GatedStreamsBlockSpec, parts: Parts) -> None:
        self._ops, self._number = parts.ops, spec.streams.streams.number
        self._ngrams = None if spec.ngrams is None else spec.ngrams.build(parts)
        self._sublayers = [_sublayer(each, spec.streams, parts) for each in spec.sublayers]

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        elementwise = self._ops.elementwise
        if self._ngrams is not None:
            x = self._ngrams(ctx, elementwise.add_(residual, x))
        for part, reader, writer in self._sublayers:
            normed = reader.normed(elementwise.add_(residual, x))
            out = part(ctx, reader.mean(normed))
            spread = elementwise.concat([out] * self._number)
            x = elementwise.scale_(elementwise.mul_sigmoid(spread, writer.of(normed)), 2.0)
        return x


def _sublayer(spec: GatedSublayerSpec, streams: GatedStreamsSpec, parts: Parts) -> _Sublayer:
    part, number = spec.part.build(parts), streams.streams.number
    reader = Reader(spec.gates, streams, parts)
    outputs = {"block_inject_weight": number}
    writer = reader.parts.linear(outputs, reader.width, input_scale=1 / number, min_bits=16)
    return _Sublayer(part, reader, writer)
