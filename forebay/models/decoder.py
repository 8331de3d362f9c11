"""A decoder-only transformer, from a description of its layers.

Shape letters: T tokens, H hidden size, N chosen positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor

from forebay.families.config.model_config import Experts, ModelConfig
from forebay.families.config.transformer import SLIDING
from forebay.formats.quantized import HEAD_BITS
from forebay.layers.adapters import Adapters, AdapterSlots
from forebay.layers.altup import AltUpSpec
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, Parts, PartSpec
from forebay.layers.context import ForwardContext
from forebay.layers.draft_head import DraftHeadSpec, StreamedDraftHeadSpec
from forebay.layers.embedding import PerLayerInputsSpec, embedding_table, lookup
from forebay.layers.gated_streams import GatedStreamsSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.norms import NormSpec, build_norm
from forebay.layers.params import TensorParam, Weights, vector
from forebay.layers.rotary import RopeSpec, RopeTables
from forebay.layers.routing import RouterSpec
from forebay.layers.streams import StreamsSpec
from forebay.ops import Gating, Ops, Scoring
from forebay.ops.exchange import WHOLE, Share
from forebay.pools.cache_spec import CacheSpec

Names = tuple[str | None, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """`tied`: the embedding is used for the logits too. Embeddings are multiplied by `embedding_scale` and, with
    `embedding_norm`, normed without a weight. Logits have a bias with `head_bias`, which excludes `tied`, are
    multiplied by `logits_scale`, and then held within +-`logits_cap`, 0 for no cap. `per_layer`: further inputs of
    layers. `streams`: None if layers have one residual stream. `norm` None: what joins the streams has norms of its
    own. `draft_head`: None if it is not used."""

    blocks: tuple[BlockSpec, ...]
    embedding: TensorParam
    norm: NormSpec | None
    norm_eps: float
    tied: bool
    max_positions: int
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    head_bias: bool = False
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    per_layer: PerLayerInputsSpec | None = None
    streams: StreamsSpec | AltUpSpec | GatedStreamsSpec | None = None
    draft_head: DraftHeadSpec | StreamedDraftHeadSpec | None = None


class DecoderOptions(TypedDict, total=False):
    """Options of `decoder_spec`, a family's `DECODER`."""

    embedding: str
    norm: str
    norm_offset: float


def decoder_spec(
    config: ModelConfig,
    blocks: Sequence[BlockSpec],
    *,
    embedding: str = "model.embed_tokens",
    norm: str = "model.norm",
    norm_offset: float = 0.0,
) -> DecoderSpec:
    """Describe the parts that all families have around their layers, under the checkpoint's names."""
    return DecoderSpec(
        blocks=tuple(blocks),
        embedding=embedding_table(f"{embedding}.weight", config.vocab_size, config.hidden_size),
        norm=vector(f"{norm}.weight", config.hidden_size, offset=norm_offset),
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
    )


def rope_spec(config: ModelConfig) -> RopeSpec:
    """Return the rotary embedding that the checkpoint's configuration describes, over the whole head."""
    return RopeSpec(config.head_dim, config.rope_theta, config.rope_scaling, config.rope_sections)


def layer_name(layer: int) -> str:
    """Return the prefix of the layer's tensors in checkpoints of transformers."""
    return f"model.layers.{layer}"


def attention_spec(
    config: ModelConfig, layer: int, *, qk_norm: QkNorm = QkNorm.NONE, rope: bool = True
) -> AttentionSpec:
    """The attention of a layer as the configuration has it; the options are what a family adds."""
    return AttentionSpec(
        name=f"{layer_name(layer)}.self_attn",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window if config.layer_types[layer] == SLIDING else 0,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=qk_norm,
        rope=rope_spec(config) if rope else None,
    )


def mlp_spec(config: ModelConfig, layer: int, *, name: str = "mlp") -> MlpSpec:
    """Return the gated feed-forward part of a layer, with tensor names below `name`."""
    return MlpSpec(
        name=f"{layer_name(layer)}.{name}",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        bias=config.mlp_bias,
    )


class GatingOptions(TypedDict, total=False):
    """Options of `Gating` beside the number of experts and their scoring."""

    normalize: Required[bool]
    epsilon: float
    scale: float
    groups: int
    best_groups: int
    least_sum: float
    summed: int


def router_spec(
    config: ModelConfig,
    experts: Experts,
    name: str,
    scoring: Scoring,
    *,
    bias: bool = False,
    correction: str = "",
    **gating: Unpack[GatingOptions],
) -> RouterSpec:
    """`name` is the checkpoint's of the linear layer; `gating` are further options of `Gating`."""
    return RouterSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_experts=experts.num_experts,
        gating=Gating(num_experts_per_tok=experts.per_token, scoring=scoring, **gating),
        bias=bias,
        correction=correction,
    )


def softmax_experts(config: ModelConfig, experts: Experts, name: str, *, router: str, normalize: bool) -> MoeSpec:
    """`name` is the checkpoint's prefix of `router` and the experts."""
    chosen = router_spec(config, experts, f"{name}.{router}", Scoring.SOFTMAX, normalize=normalize)
    return MoeSpec(name=name, router=chosen, intermediate_size=experts.intermediate_size)


def block_spec(
    config: ModelConfig,
    layer: int,
    mixer: PartSpec,
    mlp: PartSpec,
    *,
    before: Names = ("input_layernorm", "post_attention_layernorm"),
    after: Names = (None, None),
    norm_offset: float = 0.0,
) -> ResidualSpec:
    """A mixer and an MLP; `before` and `after` are what the checkpoint calls the norms around the first and around the
    second."""

    def norm(name: str | None) -> TensorParam | None:
        stored = f"{layer_name(layer)}.{name}.weight"
        return None if name is None else vector(stored, config.hidden_size, offset=norm_offset)

    sublayers = (
        SublayerSpec(part=part, before=norm(first), after=norm(last))
        for part, first, last in zip((mixer, mlp), before, after, strict=True)
    )
    return ResidualSpec(sublayers=tuple(sublayers), norm_eps=config.rms_norm_eps)


def draft_head_spec(
    config: ModelConfig, *blocks: BlockSpec, name: str | None = None, norm_offset: float = 0.0
) -> DraftHeadSpec:
    """Describe the parts that all draft heads have around their blocks, the first of which is the layer behind the
    model's."""
    return DraftHeadSpec(
        name=name or layer_name(config.num_layers),
        hidden_size=config.hidden_size,
        blocks=blocks,
        norm_eps=config.rms_norm_eps,
        norm_offset=norm_offset,
    )


def _num_drafted(spec: DecoderSpec) -> int:
    """Return the number of residual streams that the draft head is fed with; 1 for the hidden state."""
    return 1 if spec.draft_head is None else spec.draft_head.num_streams


class Model:
    """The engine's interface to a model. Its weights are read-only after loading, and it keeps nothing of a step.

    `held_bytes` divides `weight_bytes`, which excludes the overhead of packing, by form: `bfloat16`, `8 bits`, `4
    bits`. `numbers` are weights that recorded steps contain as constants, in order. Its caches are the entries of the
    `CachePool` from number `first_entry` on. `adapters` None: no layer can have one. `mrope`: layers rotate by
    `ForwardContext.rope_positions`. A rank has its `share` of layers, embedding and head. `draft_size` are the numbers
    of a token that its draft head is fed with and gives: the hidden state, or all residual streams.
    """

    generates = True

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        weights: Weights,
        *,
        num_positions: int,
        first_entry: int = 0,
        adapters: AdapterSlots | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._spec = spec
        self._ops = ops
        self.hidden_size, self.dtype = spec.embedding.inner[0], weights.dtype
        self.held_bytes, self.numbers = weights.held_bytes, weights.numbers
        self.weight_bytes = sum(weights.held_bytes.values())
        self.adapters = None if adapters is None else Adapters(adapters, ops.memory, weights.device)
        ropes = RopeTables(num_positions, weights.device, ops.memory)
        parts = Parts(ops, weights, ropes, first=first_entry, adapters=self.adapters, share=share)
        vocab_size, hidden_size = spec.embedding.shape
        self._exchange, self._vocab_size, self._per_rank = share.exchange, vocab_size, share.padded(vocab_size)
        own = share.own_padded(vocab_size)
        table = weights.table(replace(spec.embedding, own=own))
        self._embedding = lookup(parts, table)
        self._embedding_norm = parts.ones(self.hidden_size) if spec.embedding_norm else None
        self._per_layer = None if spec.per_layer is None else spec.per_layer.build(parts)
        if not spec.tied:
            head = parts.without_adapters.linear(
                {"lm_head": vocab_size}, hidden_size, bias=spec.head_bias, min_bits=HEAD_BITS, own=own
            )
            self._head = head.weight
        else:
            self._head = ops.linear.pack(table, inputs=self.dtype) if isinstance(table, Tensor) else table
        self._streams = None if spec.streams is None else spec.streams.build(parts)
        self._blocks, kept = [], []
        for block in spec.blocks:
            first = len(parts.kept)
            self._blocks.append(block.build(parts))
            kept.append(tuple(parts.kept[first:]))
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps)
        self._draft_head = None if spec.draft_head is None else spec.draft_head.build(parts.without_adapters)
        self._num_drafted = _num_drafted(spec)
        self.draft_size = self.hidden_size * self._num_drafted
        if self._draft_head is not None:
            kept.append(tuple(spec.on_device for spec in parts.kept[sum(map(len, kept)) :]))
        self.kept_by_block = tuple(kept)
        self.mrope = ropes.has_axes

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache of each mixer, in the order of the `CachePool`'s entries; last what the draft head keeps."""
        return tuple(spec for kept in self.kept_by_block for spec in kept)

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64, each in the vocabulary -> hidden states after the last norm, [T, H]. Writes KV."""
        return self.tapped(ctx, input_ids, ())[0]

    def tapped(self, ctx: ForwardContext, input_ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `forward`, and also the inputs of the layers `taps`: the residual stream [T, H] in front of each, side by
        side in the order of the layers. Without taps, what the draft head is fed with: [T, draft_size]."""
        x = self.embed(input_ids)
        features: list[Tensor] = []
        if ctx.pictures is not None:
            embeddings, *features = torch.split(ctx.pictures.table, self.hidden_size, dim=1)
            self._ops.pictures.replace_rows_(x, embeddings, ctx.pictures.rows)
        per_layer = None if self._per_layer is None else self._per_layer(ctx, input_ids, x)
        ctx = replace(ctx, per_layer=per_layer, input_ids=input_ids)
        if self._streams is not None:
            x = self._streams.spread(x)
        ops, residual, seen = self._ops, self._ops.elementwise.zeros_like(x), []
        for layer, block in enumerate(self._blocks):
            if layer in taps:
                seen.append(ops.elementwise.add_(ops.elementwise.add_(ops.elementwise.zeros_like(x), residual), x))
            x = block(ctx, x, residual)
            if ctx.pictures is not None and layer < len(features):
                x = ops.pictures.add_rows_(x, features[layer], ctx.pictures.rows)
        hidden = self._joined(x, residual)
        drafted_from = hidden if self._num_drafted == 1 else residual
        return hidden, ops.elementwise.concat(seen) if seen else drafted_from

    def _joined(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the hidden states [T, H] behind the last layer, which gave x. `residual` becomes the sum of both."""
        if self._streams is None:
            assert self._norm is not None, "one residual stream without a last norm"
            return self._norm.of_sum(x, residual)
        joined = self._streams.collapse(self._ops.elementwise.add_(residual, x))
        return joined if self._norm is None else self._norm.of(joined)

    def draft(self, ctx: ForwardContext, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_ids [T] int64, hidden [T, F] -> what is predicted of next_ids, [T, F]; F is `draft_size`. Each next
        token follows the token whose position is in `ctx`, and whose state, of `tapped` or `draft`, is in `hidden`.
        The logits of the result, `joined`, predict the tokens behind next_ids. Writes the draft head's KV."""
        assert self._draft_head is not None, "a model that was loaded without its draft head"
        return self._draft_head(ctx, self.embed(next_ids), hidden)

    def joined(self, drafted: Tensor) -> Tensor:
        """drafted [N, F] of `draft` -> the hidden states [N, H] that logits are computed from."""
        assert self._draft_head is not None, "a model that was loaded without its draft head"
        return self._draft_head.joined(drafted)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, H], as the first layer is given them."""
        exchange, per_rank = self._exchange, self._per_rank
        x = exchange.rows(self._embedding(exchange.places(input_ids, per_rank)), input_ids, per_rank)
        if self._spec.embedding_scale != 1.0:
            self._ops.elementwise.scale_(x, self._spec.embedding_scale)
        if self._embedding_norm is not None:
            x = self._ops.norms.rms_norm(x, self._embedding_norm, self._spec.norm_eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, V] float32; at ranks other than 0 zeros."""
        ops, spec = self._ops, self._spec
        logits = self._exchange.collect(ops.linear.apply_f32(hidden, self._head), self._vocab_size)
        if spec.logits_scale != 1.0:
            ops.elementwise.scale_(logits, spec.logits_scale)
        return ops.elementwise.softcap_(logits, spec.logits_cap) if spec.logits_cap else logits
