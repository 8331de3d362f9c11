"""DeepSeek-V3: latent attention, and experts in groups beside shared ones in all layers but the first."""

from __future__ import annotations

import math

from forebay.families.model_config import ModelConfig
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.latent_attention import LatentAttentionSpec
from forebay.layers.mlp import GATE_UP_DOWN, MlpSpec, MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name, mlp_spec, norm_param, rope_spec

_EPSILON = 1e-20


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    attention = latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    return latent_block(config, layer, attention, feed_forward(config, layer))


def latent_block(config: ModelConfig, layer: int, mixer: PartSpec, mlp: PartSpec) -> BlockSpec:
    return PreNormSpec(
        mixer=mixer,
        mlp=mlp,
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def latent_attention_spec(config: ModelConfig, name: str) -> LatentAttentionSpec:
    extra = config.extra
    return LatentAttentionSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        nope_dim=extra["qk_nope_head_dim"],
        rope_dim=extra["qk_rope_head_dim"],
        value_dim=extra["v_head_dim"],
        rank=extra["kv_lora_rank"],
        q_rank=extra["q_lora_rank"],
        scale=_scale(config),
        rope=rope_spec(config),
        interleaved=extra["rope_interleave"],
        bias=config.attention_bias,
    )


def _scale(config: ModelConfig) -> float:
    """A rope whose `mscale_all_dim` is named has the amplitude that YaRN wants in the scores, not in the angles' table:
    arXiv 2309.00071, section 3.4, once for queries and once for keys."""
    scale = 1 / math.sqrt(config.extra["qk_nope_head_dim"] + config.extra["qk_rope_head_dim"])
    scaling = config.rope_scaling
    if scaling is None or "mscale_all_dim" not in scaling or scaling["factor"] <= 1:
        return scale
    amplitude: float = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return scale * amplitude * amplitude


def feed_forward(
    config: ModelConfig,
    layer: int,
    *,
    correction: str = "gate.e_score_correction_bias",
    expert_names: tuple[str, str, str] = GATE_UP_DOWN,
) -> PartSpec:
    """An MLP, or experts beside a shared one; the names are the checkpoint's, behind `mlp.` and an expert's number."""
    extra = config.extra
    if extra["mlp_layer_types"][layer] == "dense":
        return mlp_spec(config, layer)
    name = f"{layer_name(layer)}.mlp"
    experts = MoeSpec(
        name=name,
        router=SigmoidRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=extra["num_experts"],
            num_experts_per_tok=extra["num_experts_per_tok"],
            normalize=extra["norm_topk_prob"],
            correction=f"{name}.{correction}",
            epsilon=_EPSILON,
            scale=extra["routed_scaling_factor"],
            groups=extra["n_group"],
            best_groups=extra["topk_group"],
        ),
        hidden_size=config.hidden_size,
        intermediate_size=extra["moe_intermediate_size"],
        num_experts=extra["num_experts"],
        names=expert_names,
    )
    shared = MlpSpec(
        name=f"{name}.shared_experts",
        hidden_size=config.hidden_size,
        intermediate_size=extra["n_shared_experts"] * extra["moe_intermediate_size"],
    )
    return SumSpec(first=experts, second=shared)
