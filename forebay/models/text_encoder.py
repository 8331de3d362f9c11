"""A text encoder, from a description of its layers: each text is computed whole, in one step, and nothing is kept.

Shape letters: T tokens of all texts of a step, S texts, N chosen vectors, H hidden size, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from forebay.families.base.embedding import Dense
from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.text_encoder import Head, TextEncoderConfig
from forebay.layers.adapters import Adapters
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.disentangled_attention import DistancesSpec
from forebay.layers.encoder_head import HeadLayerSpec, HeadSpec, JointHeadSpec
from forebay.layers.encoder_layer import EncoderLayerSpec
from forebay.layers.encoder_mlp import EncoderMlpSpec
from forebay.layers.norms import NormSpec, build_norm, layer_norm_spec, norm_name
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeSpec, RopeTables
from forebay.layers.score_biases import ScoreBiasSpec
from forebay.layers.segments import SegmentAttentionSpec, Segments
from forebay.layers.text_embeddings import TextEmbeddingsSpec
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderSpec:
    """Embeddings, layers, a norm behind the last one, a bias of all layers' scores, embeddings of distances, and a
    head; None for none."""

    embeddings: TextEmbeddingsSpec
    layers: tuple[EncoderLayerSpec, ...]
    max_positions: int
    norm: NormSpec | None = None
    norm_eps: float = 0.0
    bias: ScoreBiasSpec | None = None
    distances: DistancesSpec | None = None
    head: HeadSpec | JointHeadSpec | None = None

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line: x is a token's stream, and in the end its hidden state."""
        kinds: dict[tuple[str, ...], list[int]] = {}
        for number, layer in enumerate(self.layers):
            kinds.setdefault(tuple(layer.equations()), []).append(number)
        yield self.embeddings.equation
        for lines, numbers in kinds.items():
            yield f"\nlayers {', '.join(map(str, numbers))}:"
            yield from (f"  {line}" for line in lines)
        if self.head is not None:
            yield f"\nhead(x) = {self.head.equation}"
        if self.bias is not None:
            yield f"scores += {self.bias.equation}"
        if self.distances is not None:
            yield f"distance[d]: of {2 * self.distances.span:,} rows"
        last_x = "x" if self.norm is None else f"{norm_name(self.norm)}(x)"
        yield f"\nhidden state = {last_x}  (at most {self.max_positions:,} tokens)"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """A checkpoint's names of a layer's parts, below the layer's own. `biases`: whether attention, the first layer of
    the feed-forward part and its last one have any. `gate` and `gate_first`: see `EncoderMlpSpec`."""

    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    gate: str = ""
    gate_first: bool = False
    biases: tuple[bool, bool, bool] = (True, True, True)


BERT_NAMES: Final = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)


def attention_spec(config: TextEncoderConfig, layer: str, names: LayerNames) -> SegmentAttentionSpec:
    """Describe attention over all of a text, which rotates if the configuration has a base."""
    return SegmentAttentionSpec(
        names=tuple(f"{layer}.{name}" for name in names.qkv),
        output=f"{layer}.{names.output}",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        bias=names.biases[0],
        output_bias=names.biases[0],
        rope=RopeSpec(config.head_dim, config.rope_theta, config.rope_scaling) if config.rope_theta else None,
    )


def layer_spec(config: TextEncoderConfig, layer: str, names: LayerNames) -> EncoderLayerSpec:
    """Describe a layer with a norm behind each part."""
    width, (_, of_up, of_down) = config.hidden_size, names.biases
    return EncoderLayerSpec(
        attention=attention_spec(config, layer, names),
        mlp=EncoderMlpSpec(
            up=f"{layer}.{names.up}",
            gate=f"{layer}.{names.gate}" if names.gate else "",
            gate_first=names.gate_first,
            down=f"{layer}.{names.down}",
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            up_bias=of_up,
            down_bias=of_down,
        ),
        norms=(
            layer_norm_spec(f"{layer}.{names.attention_norm}", width, bias=True),
            layer_norm_spec(f"{layer}.{names.mlp_norm}", width, bias=True),
        ),
        norm_eps=config.rms_norm_eps,
    )


MakeHead = Callable[[TextEncoderConfig], HeadSpec | JointHeadSpec | None]


def bert_spec(config: ModelConfig, head: MakeHead, names: LayerNames = BERT_NAMES) -> TextEncoderSpec:
    """Describe an encoder with BERT's embeddings and layers, whose parts have these names."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    return TextEncoderSpec(
        embeddings=embeddings_spec(config),
        layers=tuple(layer_spec(config, f"encoder.layer.{i}", names) for i in range(config.num_layers)),
        max_positions=config.max_position_embeddings,
        head=head(config),
    )


def rotary_spec(config: ModelConfig, layers: str, names: LayerNames, *, norm: str, head: MakeHead) -> TextEncoderSpec:
    """Describe an encoder whose positions rotate queries and keys; `norm` is that of the embeddings."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    embeddings = replace(
        embeddings_spec(config), positions="", norm=layer_norm_spec(norm, config.hidden_size, bias=True)
    )
    return TextEncoderSpec(
        embeddings=embeddings,
        layers=tuple(layer_spec(config, f"{layers}.{i}", names) for i in range(config.num_layers)),
        max_positions=config.max_position_embeddings,
        head=head(config),
    )


def embeddings_spec(config: TextEncoderConfig) -> TextEmbeddingsSpec:
    """Describe the embeddings under BERT's names."""
    return TextEmbeddingsSpec(
        words="embeddings.word_embeddings",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        positions="embeddings.position_embeddings",
        num_positions=config.max_position_embeddings,
        offset=config.position_offset,
        types="embeddings.token_type_embeddings" if config.num_types else "",
        num_types=config.num_types,
        norm=layer_norm_spec("embeddings.LayerNorm", config.hidden_size, bias=True),
        norm_eps=config.rms_norm_eps,
    )


def head_spec(
    config: TextEncoderConfig, *, dense: str = "", output: str = "classifier", activation: str = "tanh"
) -> HeadSpec | JointHeadSpec | None:
    """Describe the head. That of a text has a layer `dense` before its `output`; that of tokens has neither, and its
    output is `classifier`."""
    width = config.hidden_size
    if config.head is Head.TOKENS or not dense:
        return head_behind(config, (), "classifier" if config.head is Head.TOKENS else output)
    before = HeadLayerSpec(name=dense, inputs=width, outputs=width, activation=activation)
    return head_behind(config, (before,), output)


def head_behind(
    config: TextEncoderConfig, layers: tuple[HeadLayerSpec, ...], output: str
) -> HeadSpec | JointHeadSpec | None:
    """Describe the classification head with these `layers` before its `output`; of a model without labels the dense
    layers behind the pooling, or those behind each token; None without any."""
    if config.head is not Head.NONE:
        last = HeadLayerSpec(name=output, inputs=config.hidden_size, outputs=len(config.labels))
        return HeadSpec(layers=(*layers, last), what="labels")
    if config.token_layers:
        return JointHeadSpec(layers=tuple(map(_dense_spec, config.token_layers)), what="of each token")
    return HeadSpec(layers=tuple(map(_dense_spec, config.dense)), what="numbers") if config.dense else None


def _dense_spec(layer: Dense) -> HeadLayerSpec:
    return HeadLayerSpec(
        name=layer.layer, inputs=layer.inputs, outputs=layer.outputs, bias=layer.bias, activation=layer.activation
    )


class TextEncoder:
    """A `Network` without caches. Its weights are read-only after loading, and it keeps nothing of a step."""

    generates = mrope = False
    adapters: Adapters | None = None
    kept_by_block: tuple[tuple[CacheSpec, ...], ...] = ()

    def __init__(self, spec: TextEncoderSpec, ops: Ops, weights: Weights, *, num_positions: int) -> None:
        self.hidden_size, self.dtype = spec.embeddings.hidden_size, weights.dtype
        self.held_bytes, self.numbers = weights.held_bytes, weights.numbers
        self.weight_bytes = sum(weights.held_bytes.values())
        self._longest = num_positions
        self._narrow = ops.elementwise.narrow
        parts = Parts(ops, weights, RopeTables(num_positions, weights.device, ops.memory))
        self._embeddings = spec.embeddings.build(parts)
        self._layers = [layer.build(parts) for layer in spec.layers]
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps, float32=True).of
        self._reach = max(layer.attention.reach for layer in spec.layers)
        self._bias = None if spec.bias is None else spec.bias.build(parts, num_positions)
        self._distances = None if spec.distances is None else spec.distances.build(parts)
        self._head = None if spec.head is None else spec.head.build(parts)
        assert not parts.kept, "a text encoder keeps nothing"

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return nothing: no layer has a cache."""
        return ()

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64, each below V -> hidden states behind the last layer, [T, H]. Each sequence is a whole
        text."""
        texts = Segments.of(ctx.full.q_start, ctx.positions, self._longest, self._reach)
        if self._bias is not None:
            texts = replace(texts, bias=self._bias)
        if self._distances is not None:
            texts = replace(texts, distances=self._distances.up_to(int(ctx.positions.max()) + 1))
        x = self._embeddings(input_ids, ctx.positions)
        for layer in self._layers:
            x = layer(x, texts)
        return self._narrow(x if self._norm is None else self._norm(x), self.dtype)

    def tapped(self, ctx: ForwardContext, input_ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `forward`; nothing is tapped, since nothing drafts."""
        assert not taps, taps
        hidden = self.forward(ctx, input_ids)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> what the head gives, such as logits of labels: [N, outputs] float32, [N, 0] without one."""
        if self._head is None:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        return self._head(hidden)
