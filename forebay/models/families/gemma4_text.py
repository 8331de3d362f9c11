from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.gemma4 import Gemma4Config
from forebay.layers.build import PartSpec
from forebay.layers.embedding import PerLayerInputsSpec, embedding_table
from forebay.layers.params import vector
from forebay.models.decoder import (
    DecoderSpec,
    decoder_spec,
)
from forebay.models.families.parts.gemma4 import block, own_attention, reading


def describe(config: Gemma4Config) -> DecoderSpec:
    """Describe the whole model, with an embedding for each layer if the configuration has one."""
    blocks = [block(config, layer, _attention(config, layer)) for layer in range(config.num_layers)]
    return replace(
        decoder_spec(config, blocks),
        embedding_scale=float(config.hidden_size) ** 0.5,
        logits_cap=config.logits_cap,
        per_layer=_per_layer_inputs(config) if config.per_layer_size else None,
    )


def _attention(config: Gemma4Config, layer: int) -> PartSpec:
    owner, own = config.kv_owners[layer], own_attention(config, layer)
    return own if owner == layer else reading(own, owner)


def _per_layer_inputs(config: Gemma4Config) -> PerLayerInputsSpec:
    name, size = "model.embed_tokens_per_layer.weight", config.per_layer_size
    return PerLayerInputsSpec(
        table=embedding_table(name, config.per_layer_vocab_size, config.num_layers * size),
        projection="model.per_layer_model_projection",
        norm=vector("model.per_layer_projection_norm.weight", size),
        norm_eps=config.rms_norm_eps,
        hidden_size=config.hidden_size,
    )
