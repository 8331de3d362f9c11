from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import LINEAR
from forebay.families.qwen4_exp_text.config import Qwen4Config
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import PartSpec
from forebay.layers.draft_head import StreamedDraftHeadSpec
from forebay.layers.gated_streams import GatedStreamsBlockSpec, GatedStreamsSpec, GatedSublayerSpec
from forebay.layers.ngrams import NgramInputsSpec
from forebay.layers.pooled_indexer import MeanIndexerSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name
from forebay.models.families.parts.gated_delta import (
    NORM_OFFSET,
    delta_spec,
    gated_attention,
    separate_inputs,
    with_draft_layer,
)
from forebay.models.families.parts.shared_experts import experts_and_shared


def describe(config: Qwen4Config) -> DecoderSpec:
    """Describe the model: several residual streams, which gates join for the head."""
    blocks = [_block(config, layer, _mixer(config, layer)) for layer in range(config.num_layers)]
    return replace(decoder_spec(config, blocks), norm=None, streams=_streams(config))


def draft_head(config: Qwen4Config) -> StreamedDraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens: it attends to all tokens. The files have an indexer
    for it, whose selection has all of the first `indexer_budget` tokens."""
    name, layer = layer_name(config.num_layers), config.num_layers
    drafting = with_draft_layer(config)
    return StreamedDraftHeadSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_streams=config.streams.number,
        block=_block(drafting, layer, gated_attention(drafting, layer)),
        streams=_streams(config, name),
        norm=None,
        norm_eps=config.rms_norm_eps,
        norm_offset=NORM_OFFSET,
        joint_norm=True,
    )


def _streams(config: Qwen4Config, name: str = "model") -> GatedStreamsSpec:
    return GatedStreamsSpec(
        name=f"{name}.hyper_connection_mixer",
        hidden_size=config.hidden_size,
        streams=config.streams,
        norm_eps=config.rms_norm_eps,
        norm_offset=NORM_OFFSET,
    )


def _block(config: Qwen4Config, layer: int, mixer: PartSpec) -> GatedStreamsBlockSpec:
    name = layer_name(layer)
    mlp = experts_and_shared(config, layer, normalize=config.norm_topk_prob)
    return GatedStreamsBlockSpec(
        sublayers=(
            GatedSublayerSpec(part=mixer, gates=f"{name}.attn_hyper_connection"),
            GatedSublayerSpec(part=mlp, gates=f"{name}.mlp_hyper_connection"),
        ),
        streams=_streams(config),
        ngrams=_ngrams(config, layer),
    )


def _ngrams(config: Qwen4Config, layer: int) -> NgramInputsSpec | None:
    if config.ngrams is None or layer not in config.ngrams.layers:
        return None
    return NgramInputsSpec(
        name=f"{layer_name(layer)}.ple",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_streams=config.streams.number,
        ngrams=config.ngrams,
        table=config.ngrams.layers.index(layer),
        norm_eps=config.rms_norm_eps,
        norm_offset=NORM_OFFSET,
    )


def _mixer(config: Qwen4Config, layer: int) -> PartSpec:
    if config.layer_types[layer] == LINEAR:
        return replace(delta_spec(config, layer, separate_inputs(config)), sigmoid_gate=config.sigmoid_gate)
    return _attention(config, layer)


def _attention(config: Qwen4Config, layer: int) -> AttentionSpec:
    dense = gated_attention(config, layer)
    assert dense.rope is not None, "rotated queries and keys"
    indexer = MeanIndexerSpec(
        name="indexer",
        hidden_size=config.hidden_size,
        index=config.index,
        rope=dense.rope,
        norm_eps=config.rms_norm_eps,
        norm_offset=NORM_OFFSET,
    )
    return replace(dense, indexer=indexer)
