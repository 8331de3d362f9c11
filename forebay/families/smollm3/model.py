from __future__ import annotations

from forebay.families.smollm3.config import SmolLM3Config
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, mlp_spec, pre_norm


def block(config: SmolLM3Config, layer: int) -> BlockSpec:
    return pre_norm(config, layer, attention_spec(config, layer, rope=config.has_rope[layer]), mlp_spec(config, layer))
