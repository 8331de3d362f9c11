from __future__ import annotations

from dataclasses import replace

from forebay.families.gemma3n_text.config import Gemma3nConfig
from forebay.formats.quantized import HEAD_BITS
from forebay.layers.altup import AltUpBlockSpec, AltUpSpec, LaurelSpec
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.embedding import PerLayerGateSpec, PerLayerInputsSpec
from forebay.layers.mlp import Activation
from forebay.layers.params import TensorParam, vector
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, mlp_spec
from forebay.models.families.parts.gemma4 import reading


def describe(config: Gemma3nConfig) -> DecoderSpec:
    """Describe the whole model, whose layers have several streams and inputs of their own."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    return replace(
        decoder_spec(config, blocks),
        embedding_scale=float(config.hidden_size) ** 0.5,
        logits_cap=config.logits_cap,
        per_layer=_per_layer_inputs(config),
        streams=_streams(config),
    )


def _streams(config: Gemma3nConfig) -> AltUpSpec:
    return AltUpSpec(
        hidden_size=config.hidden_size,
        num_streams=config.streams,
        active=config.active_stream,
        norm_eps=config.rms_norm_eps,
        spread="model.altup_projections",
        collapse="model.altup_unembed_projections",
    )


def _block(config: Gemma3nConfig, layer: int) -> BlockSpec:
    name, size = layer_name(layer), config.hidden_size

    def norm(of: str) -> TensorParam:
        return vector(f"{name}.{of}.weight", size)

    mlp = replace(
        mlp_spec(config, layer),
        activation=Activation.GELU_TANH,
        intermediate_size=config.intermediate_sizes[layer],
        deviations=config.deviations[layer],
    )
    return AltUpBlockSpec(
        name=name,
        streams=_streams(config),
        mixer=SublayerSpec(
            part=_attention(config, layer), before=norm("input_layernorm"), after=norm("post_attention_layernorm")
        ),
        mlp=SublayerSpec(part=mlp, before=norm("pre_feedforward_layernorm"), after=norm("post_feedforward_layernorm")),
        laurel=LaurelSpec(
            name=f"{name}.laurel", hidden_size=size, rank=config.laurel_rank, norm_eps=config.rms_norm_eps
        ),
        gate=PerLayerGateSpec(name=name, layer=layer, size=config.per_layer_size, hidden_size=size),
        gate_norm=norm("post_per_layer_input_norm"),
        scaled=config.scaled,
    )


def _attention(config: Gemma3nConfig, layer: int) -> PartSpec:
    """Describe attention whose scores are not scaled, as queries and keys are normed."""
    own = replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        rope=RopeSpec(config.head_dim, *config.ropes[config.layer_types[layer]]),
        scale=1.0,
        value_norm=True,
    )
    owner = config.kv_owners[layer]
    return own if owner == layer else reading(own, owner)


def _per_layer_inputs(config: Gemma3nConfig) -> PerLayerInputsSpec:
    size, rows = config.per_layer_size, config.per_layer_vocab_size
    beyond = max(0, config.vocab_size - rows)  # ids of pictures and sounds, which take the first row
    table = TensorParam(
        names=("model.embed_tokens_per_layer.weight",),
        sizes=(rows,),
        inner=(config.num_layers * size,),
        rows=(range(rows), *[range(1)] * beyond) if beyond else (),
        min_bits=HEAD_BITS,
    )
    return PerLayerInputsSpec(
        table=table,
        projection="model.per_layer_model_projection",
        norm=vector("model.per_layer_projection_norm.weight", size),
        norm_eps=config.rms_norm_eps,
        hidden_size=config.hidden_size,
    )
