from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.own_code import OWN_CODE

_KV_HEADS: Final = 8
_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
_NAMES: Final = TensorNames(
    renamed=(
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.attn\.attention\.(\w)_proj\.", r".self_attn.\1_proj."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )
)


def parse(fields: Fields) -> ModelConfig:
    """Read EXAONE 3's fields, under their published names or those of transformers."""
    fields = fields.renamed(_FIELDS)
    fields.only("hidden_act", "silu")
    if not fields.has("num_key_value_heads"):
        fields = fields.replaced(num_key_value_heads=_KV_HEADS)
    return ModelConfig(
        **transformer(fields, Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=500_000.0, mlp_bias=True))
    )


FAMILY: Final = Family(parse=parse, harmless=OWN_CODE | {"embed_dropout"}, names=_NAMES)
