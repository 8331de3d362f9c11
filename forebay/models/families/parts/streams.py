"""Layers of several residual streams, as DeepSeek V4 has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from forebay.families.base.mixers import HyperConnections
from forebay.families.config.model_config import ModelConfig
from forebay.layers.blocks import SublayerSpec
from forebay.layers.build import PartSpec
from forebay.layers.params import vector
from forebay.layers.streams import StreamedSpec, StreamedSublayerSpec, StreamsSpec
from forebay.models.decoder import layer_name


class Streamed(NamedTuple):
    """A part of a layer, the checkpoint's name of the norm before it, and how the names begin of the weights that mix
    streams around it."""

    part: PartSpec
    norm: str
    mixing: str


def streams_spec(config: ModelConfig, hyper: HyperConnections, *, name: str = "") -> StreamsSpec:
    """Describe the streams; `name` is how the names begin of the weights that join them, "" for none."""
    return StreamsSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_streams=hyper.num_streams,
        iterations=hyper.iterations,
        norm_eps=config.rms_norm_eps,
        eps=hyper.eps,
    )


def streamed_block(config: ModelConfig, layer: int, parts: Iterable[Streamed], streams: StreamsSpec) -> StreamedSpec:
    """Describe a layer of these parts, one after the other."""
    name = layer_name(layer)
    return StreamedSpec(
        sublayers=tuple(
            StreamedSublayerSpec(
                sublayer=SublayerSpec(part=each.part, before=vector(f"{name}.{each.norm}.weight", config.hidden_size)),
                mixing=f"{name}.{each.mixing}",
            )
            for each in parts
        ),
        streams=streams,
    )
