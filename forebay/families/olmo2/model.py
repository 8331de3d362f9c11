from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PostNormSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, mlp_spec, norm_param


def block(config: ModelConfig, layer: int, *, rope: bool = True) -> BlockSpec:
    return PostNormSpec(
        mixer=attention_spec(config, layer, qk_norm=QkNorm.FULL, rope=rope),
        mlp=mlp_spec(config, layer),
        mixer_norm=norm_param(config, layer, "post_attention_layernorm"),
        mlp_norm=norm_param(config, layer, "post_feedforward_layernorm"),
        norm_eps=config.rms_norm_eps,
    )
