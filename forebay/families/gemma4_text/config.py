from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.parts.gemma4 import HARMLESS, Gemma4Config, parse
from forebay.families.parts.shared_kv import is_of_shared_kv


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


def _unused(config: ModelConfig, name: str) -> bool:
    assert isinstance(config, Gemma4Config), type(config)
    return is_of_shared_kv(config, name)


_NAMES: Final = TensorNames(stacked_experts=True, stacks=("experts.gate_up_proj", "experts.down_proj"))
FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=_NAMES, unused=_unused)
