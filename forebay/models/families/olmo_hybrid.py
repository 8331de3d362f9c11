from __future__ import annotations

from forebay.families.config.transformer import LINEAR
from forebay.families.olmo_hybrid.config import OlmoHybridConfig
from forebay.layers.build import BlockSpec
from forebay.layers.gated_delta import GatedDeltaSpec
from forebay.models.decoder import block_spec, layer_name, mlp_spec
from forebay.models.families.parts import norms_behind as olmo2

_DELTA_NORM_EPS = 1e-5  # whatever the other norms have: as in transformers


def block(config: OlmoHybridConfig, layer: int) -> BlockSpec:
    """Describe a layer: a delta rule with norms before its parts, or OLMo 2's attention with norms behind them."""
    if config.layer_types[layer] == LINEAR:
        return block_spec(config, layer, _delta_net(config, layer), mlp_spec(config, layer))
    return olmo2.block(config, layer, rope=config.has_rope)


def _delta_net(config: OlmoHybridConfig, layer: int) -> GatedDeltaSpec:
    delta = config.delta
    keys, values, heads = delta.key_size, delta.value_size, delta.num_value_heads
    return GatedDeltaSpec(
        name=f"{layer_name(layer)}.linear_attn",
        hidden_size=config.hidden_size,
        delta=delta,
        norm_eps=_DELTA_NORM_EPS,
        inputs=(
            ("q_proj", keys),
            ("k_proj", keys),
            ("v_proj", values),
            ("g_proj", values),
            ("b_proj", heads),
            ("a_proj", heads),
        ),
        kernels=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm_name="o_norm",
        output_name="o_proj",
        most_beta=2.0 if config.linear_allow_neg_eigval else 1.0,
    )
