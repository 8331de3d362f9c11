from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import MSCALES, rope_parameters
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.idle_windows import without_idle_window
from forebay.families.parts.own_code import OWN_CODE
from forebay.families.parts.wide_experts import NAMES, MixtralConfig, wide_experts

_KV_HEADS: Final = 8
_PER_TOKEN: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PhimoeConfig(MixtralConfig):
    """`jitter`: an expert is weighed against those at most twice that far below it. `head_bias`: logits have one."""

    jitter: float
    head_bias: bool


def parse(fields: Fields) -> PhimoeConfig:
    """Read Phi-3.5-MoE's fields. Raises ModelError for a scaled rope other than LongRoPE with both amplitudes, and for
    other than two experts of a token, which is what a SparseMixer chooses."""
    fields, rope = without_idle_window(fields), rope_parameters(fields)
    if rope.get("rope_type", rope.get("type", "default")) != "default" and not set(MSCALES) <= rope.keys():
        raise fields.wrong("rope_parameters", f"of the type default or longrope, with {' and '.join(MSCALES)}")
    if not fields.has("num_key_value_heads"):
        fields = fields.replaced(num_key_value_heads=_KV_HEADS)
    fields.only("num_experts_per_tok", _PER_TOKEN)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=1e6)
    values = transformer(fields, defaults, windows=Windows(size=0, listed=False))
    experts = wide_experts(fields, values["intermediate_size"], number=16, per_token=_PER_TOKEN)
    if experts.num_experts < _PER_TOKEN:
        raise fields.wrong("num_local_experts", f"at least {_PER_TOKEN}")
    head_bias = fields.flag("lm_head_bias", default=False)
    if head_bias and values["tie_word_embeddings"]:
        raise fields.wrong("lm_head_bias", "false with tied embeddings")
    jitter = fields.number("router_jitter_noise", default=0.01)
    return PhimoeConfig(**values, experts=experts, jitter=jitter, head_bias=head_bias)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: a LongRoPE for 16 times the length that it was trained on, with the same
    factors for both, since transformers 5.24 takes the short ones at any length."""
    half = shape.head_dim // 2
    factors = [1.0 + i / half for i in range(half)]
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        **dict.fromkeys(MSCALES, 1.2),
        "original_max_position_embeddings": 2048,
    }
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}
    return {
        **experts,
        "rope_parameters": rope,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
    }


FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=OWN_CODE | {"input_jitter_noise"},
    names=TensorNames(
        renamed=(*NAMES.renamed, (r"\.block_sparse_moe\.router\.", ".block_sparse_moe.gate.")),
        stacked_experts=NAMES.stacked_experts,
        expert_parts=NAMES.expert_parts,
    ),
)
