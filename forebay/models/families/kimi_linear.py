from __future__ import annotations

from dataclasses import replace

from forebay.families.kimi_linear.config import KimiLinearConfig
from forebay.families.transformer import FULL
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.models.decoder import block_spec, layer_name
from forebay.models.families.deepseek_v3 import feed_forward, latent_attention_spec

_EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up and down


def block(config: KimiLinearConfig, layer: int) -> BlockSpec:
    """Describe a layer: a delta rule or latent attention, and an MLP or experts."""
    return block_spec(config, layer, _mixer(config, layer), feed_forward(config, layer, expert_names=_EXPERT_NAMES))


def _mixer(config: KimiLinearConfig, layer: int) -> PartSpec:
    name = f"{layer_name(layer)}.self_attn"
    if config.layer_types[layer] == FULL:
        return replace(latent_attention_spec(config, name), rope=None)
    return kimi_delta_spec(config, name, low_rank=True, a_log_shape=(1, 1, config.delta.num_heads, 1))


def kimi_delta_spec(
    config: KimiLinearConfig, name: str, *, low_rank: bool, a_log_shape: tuple[int, ...]
) -> KimiDeltaSpec:
    """Describe the delta rule of the checkpoint's part `name`. `low_rank`: the gates come through a low-rank layer."""
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        delta=config.delta,
        norm_eps=config.rms_norm_eps,
        low_rank=low_rank,
        a_log_shape=a_log_shape,
    )
