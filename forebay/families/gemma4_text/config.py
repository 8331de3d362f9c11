from __future__ import annotations

import re
from typing import Any, Final

from forebay.families.model_config import Family, ModelConfig
from forebay.families.parts.gemma4 import HARMLESS, Gemma4Config, parse
from forebay.families.shape import WINDOW, Shape
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import FULL, SLIDING

_SHARED_KV: Final = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.[kv]_(proj|norm)\.")


def small(shape: Shape) -> dict[str, Any]:
    """Let a third of the layers read the KV of others, if there are three or more."""
    return {
        "layer_types": [*shape.cycle(SLIDING, FULL)[:-1], FULL],
        "sliding_window": WINDOW,
        "num_kv_shared_layers": shape.num_layers // 3,
        "global_head_dim": 2 * shape.head_dim,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": shape.head_dim,
        "vocab_size_per_layer_input": shape.vocab_size,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": shape.hidden_size,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }


def _is_of_shared_kv(config: ModelConfig, name: str) -> bool:
    """Published files have keys and values of layers, too, that read those of others."""
    assert isinstance(config, Gemma4Config), type(config)
    found = _SHARED_KV.match(name)
    layer = -1 if found is None else int(found[1])
    return 0 <= layer < config.num_layers and config.kv_owners[layer] != layer


_NAMES: Final = TensorNames(stacked_experts=True, stacks=("experts.gate_up_proj", "experts.down_proj"))
FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=_NAMES, unused=_is_of_shared_kv)
