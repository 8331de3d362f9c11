"""Layers of Gemma 4, which its assistant reads as well."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import Experts
from forebay.families.config.transformer import SLIDING
from forebay.families.parts.gemma4 import Gemma4Config
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.blocks import BranchesSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.embedding import PerLayerGateSpec
from forebay.layers.mlp import Activation, MlpSpec, MoeSpec
from forebay.layers.params import TensorParam, vector
from forebay.layers.query_attention import QueryAttentionSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, mlp_spec, router_spec
from forebay.ops import Scoring

_SCALE = 1.0  # of scores: queries and keys are normed


def block(config: Gemma4Config, layer: int, attention: PartSpec) -> BlockSpec:
    """Describe a layer around `attention`: an MLP, experts beside it and a gated embedding of the layer, each if the
    configuration has it."""
    mlp = _mlp(config, layer)
    spec = block_spec(
        config,
        layer,
        attention,
        mlp if config.experts is None else _with_experts(config, layer, mlp, config.experts),
        before=("input_layernorm", None if config.experts else "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    own = (_per_layer_gate(config, layer),) if config.per_layer_size else ()
    return replace(spec, sublayers=(*spec.sublayers, *own), scale=f"{layer_name(layer)}.layer_scalar")


def own_attention(config: Gemma4Config, layer: int) -> AttentionSpec:
    """Describe the attention of a layer that keeps its KV."""
    kind = config.layer_types[layer]
    heads = config.heads[kind]
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.dim,
        rope=RopeSpec(heads.dim, *config.ropes[kind]),
        scale=_SCALE,
        value_norm=True,
        values_from_keys=config.values_from_keys and kind != SLIDING,
        bidirectional=config.bidirectional and kind == SLIDING,
    )


def reading(own: AttentionSpec, layer: int) -> QueryAttentionSpec:
    """Describe the attention over the KV that another `layer` keeps, whose number in the `CachePool` that is: all
    layers attend."""
    assert own.rope is not None
    return QueryAttentionSpec(
        name=own.name,
        kept_by=layer,
        hidden_size=own.hidden_size,
        num_heads=own.num_heads,
        head_dim=own.head_dim,
        norm_eps=own.norm_eps,
        rope=own.rope,
        sliding_window=own.sliding_window,
        scale=own.scale,
        bias=own.qkv_bias,
        bidirectional=own.bidirectional,
    )


def _mlp(config: Gemma4Config, layer: int) -> MlpSpec:
    wide = config.wide_readers and config.kv_owners[layer] != layer
    size = config.intermediate_size * (2 if wide else 1)
    return replace(mlp_spec(config, layer), activation=Activation.GELU_TANH, intermediate_size=size)


def _with_experts(config: Gemma4Config, layer: int, mlp: MlpSpec, experts: Experts) -> PartSpec:
    """Beside the MLP, each between norms of its own. The router norms by itself, as if its layer had the norm's weight
    over sqrt(H)."""
    name, size, eps = layer_name(layer), config.hidden_size, config.rms_norm_eps

    def norm(of: str) -> TensorParam:
        return vector(f"{name}.{of}.weight", size)

    router = replace(
        router_spec(config, experts, f"{name}.router.proj", Scoring.SOFTMAX, normalize=True),
        factors=f"{name}.router.per_expert_scale",
        norm=f"{name}.router.scale",
        norm_eps=eps,
        scale=size**-0.5,
    )
    mixture = MoeSpec(
        name=name,
        router=router,
        intermediate_size=experts.intermediate_size,
        activation=Activation.GELU_TANH,
        norm=norm("pre_feedforward_layernorm_2"),
        norm_eps=eps,
    )
    return BranchesSpec(
        sublayers=(
            SublayerSpec(
                part=mlp, before=norm("pre_feedforward_layernorm"), after=norm("post_feedforward_layernorm_1")
            ),
            SublayerSpec(part=mixture, after=norm("post_feedforward_layernorm_2")),
        ),
        norm_eps=eps,
    )


def _per_layer_gate(config: Gemma4Config, layer: int) -> SublayerSpec:
    name = layer_name(layer)
    gate = PerLayerGateSpec(name=name, layer=layer, size=config.per_layer_size, hidden_size=config.hidden_size)
    return SublayerSpec(part=gate, after=vector(f"{name}.post_per_layer_input_norm.weight", config.hidden_size))
