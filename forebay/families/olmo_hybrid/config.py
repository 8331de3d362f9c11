from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import DeltaNet
from forebay.families.base.rope import rope_parameters
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, LINEAR, Defaults, layers_of, transformer
from forebay.families.parts import gated_delta as qwen3_5
from forebay.families.parts.gated_delta import delta_net


@dataclass(frozen=True, kw_only=True, slots=True)
class OlmoHybridConfig(ModelConfig):
    """A configuration with a gated delta rule; with `linear_allow_neg_eigval` its beta goes up to 2."""

    delta: DeltaNet
    linear_allow_neg_eigval: bool
    has_rope: bool


def parse(fields: Fields) -> OlmoHybridConfig:
    """Read OLMo Hybrid's fields: three layers of four have a delta rule by default. A null as rope's theta means no
    rotary embeddings."""
    defaults = Defaults(kv_heads=True)
    theta = defaults.rope_theta if not fields.has("rope_theta") else fields.get("rope_theta")
    theta = rope_parameters(fields).get("rope_theta", theta)
    values = transformer(fields, defaults, layer_types=())
    num_layers, heads, hidden_size = values["num_layers"], values["num_heads"], values["hidden_size"]
    computed = [LINEAR if i % 4 != 3 else FULL for i in range(num_layers)]
    if num_layers < 4:
        computed[-1] = FULL
    values["layer_types"] = tuple(layers_of(fields, computed))
    key_heads = fields.size("linear_num_key_heads", default=heads)
    key_size = fields.size("linear_key_head_dim", default=max(1, int(0.75 * hidden_size / key_heads)))
    return OlmoHybridConfig(
        **values,
        delta=delta_net(fields, key_heads=heads, value_heads=heads, key_size=key_size, value_size=2 * key_size),
        linear_allow_neg_eigval=fields.flag("linear_allow_neg_eigval", default=True),
        has_rope=theta is not None,  # a null, which is not an absence, is how published files say so
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: Qwen3.5's, with as many value heads as attention heads."""
    return {**qwen3_5.small(shape), "linear_num_value_heads": shape.num_heads}


# How transformers makes weights that are not in a file.
_INITIAL: Final = frozenset(
    {"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"}
)
# Published files call the norms of delta nets so, and those that transformers writes one of attention's, too.
_NAMES: Final = TensorNames(
    renamed=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )
)

FAMILY: Final = Family(parse=parse, small=small, harmless=_INITIAL, names=_NAMES)
