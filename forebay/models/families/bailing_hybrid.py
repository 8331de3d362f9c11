from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import FULL
from forebay.families.parts.kimi_delta import KimiLinearConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.models.decoder import DecoderOptions, block_spec, draft_head_spec, layer_name
from forebay.models.families.parts.kimi_delta import kimi_delta_spec
from forebay.models.families.parts.latent import feed_forward, latent_attention_spec, with_draft_layer

DECODER: DecoderOptions = {"embedding": "model.word_embeddings"}


def block(config: KimiLinearConfig, layer: int) -> BlockSpec:
    """Describe a layer; its router corrects the choice of experts by `gate.expert_bias`."""
    return block_spec(config, layer, _mixer(config, layer), feed_forward(config, layer, correction="gate.expert_bias"))


def draft_head(config: KimiLinearConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return draft_head_spec(config, block(with_draft_layer(config), config.num_layers))


def _mixer(config: KimiLinearConfig, layer: int) -> PartSpec:
    name = f"{layer_name(layer)}.attention"
    if config.layer_types[layer] == FULL:
        return replace(latent_attention_spec(config, name), head_gate=True, output_name="dense")
    delta = kimi_delta_spec(config, name, low_rank=False, a_log_shape=(config.delta.num_heads,))
    return replace(delta, output_name="dense")
