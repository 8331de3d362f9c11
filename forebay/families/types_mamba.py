"""Models with Mamba mixers, in transformers' names where the families agree, and in Bamba's where they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, Fields
from forebay.families.mamba_fields import (
    HYBRID,
    MAMBA,
    MLP,
    MOE,
    bamba_mixer,
    count_of,
    expanded,
    factor,
    factors,
    groups_of,
    hybrid_transformer,
    kernel_width,
    listed_layers,
    rank_of,
    step_limit,
)
from forebay.families.rope import ROPE_FIELDS, without_partial_rotary
from forebay.families.tensor_names import DOWN, GATE_UP, TensorNames
from forebay.families.transformer import FULL, ModelType

_FALCON_H1_FACTORS: Final = (
    "lm_head_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def _parse_falcon_h1(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = hybrid_transformer(kind, fields, [HYBRID] * fields.size("num_hidden_layers", most=MAX_LAYERS))
    by_factor = fields.is_null("mamba_d_ssm")
    intermediate = expanded(fields) if by_factor else fields.size("mamba_d_ssm", default=1024)
    values["extra"] |= {
        **bamba_mixer(fields, intermediate),
        **{name: factor(fields, name) for name in _FALCON_H1_FACTORS},
        "mlp_multipliers": factors(fields, "mlp_multipliers", 2),
        "ssm_multipliers": factors(fields, "ssm_multipliers", 5),
        "projectors_bias": fields.flag("projectors_bias", default=False),
        "mamba_rms_norm": fields.flag("mamba_rms_norm", default=False),
        "mamba_norm_before_gate": fields.flag("mamba_norm_before_gate", default=True),
    }
    return values


# Before transformers 5 Nemotron-H called its mixer's fields what Bamba does.
_OLD_NEMOTRON_H_NAMES: Final = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
# transformers' own name of what its checkpoints call backbone; what drafts tokens (`mtp.`) is not served.
_NEMOTRON_H_NAMES: Final = TensorNames(renamed=((r"^model\.", "backbone."),), unused=("mtp.",))
_NEMOTRON_H_LETTERS: Final = {"M": MAMBA, "E": MOE, "*": FULL, "-": MLP}


def _parse_nemotron_h(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.renamed(_OLD_NEMOTRON_H_NAMES, nulls=True)
    fields.only("mlp_hidden_act", "relu2")
    fields.only("mamba_hidden_act", "silu")
    layers = _nemotron_h_layers(fields)
    eps = fields.number("layer_norm_epsilon", default=1e-5)
    inner = fields.size("intermediate_size", default=21504)
    sizes = {"num_hidden_layers": len(layers), "rms_norm_eps": eps, "intermediate_size": inner}
    values = hybrid_transformer(kind, fields.dropped(*ROPE_FIELDS), layers, **sizes)
    heads = fields.size("mamba_num_heads", default=128)
    values["tie_word_embeddings"] = False
    values["extra"] |= {
        "mamba_n_heads": heads,
        "mamba_d_head": fields.size("mamba_head_dim", default=64),
        "mamba_n_groups": groups_of(fields, "n_groups", heads, default=8),
        "mamba_d_state": fields.size("ssm_state_size", default=128),
        "mamba_d_conv": kernel_width(fields, "conv_kernel"),
        "mamba_conv_bias": fields.flag("use_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("use_bias", default=False),
        # What transformers computes a prompt with; its own field time_step_limit has no effect there.
        "time_step_limit": (fields.number("time_step_min", default=0.001), math.inf),
    }
    values["extra"] |= _nemotron_h_experts(fields) if MOE in layers else {"num_experts": 0}
    return values


def _nemotron_h_layers(fields: Fields) -> list[str]:
    for name in ("layers_block_type", "layer_types"):
        if fields.get(name) is not None:
            return listed_layers(fields, name, (MAMBA, FULL, MLP, MOE))
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return [MAMBA, MOE, FULL, MLP]
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(_NEMOTRON_H_LETTERS):
        raise fields.wrong("hybrid_override_pattern", f"of the letters {''.join(_NEMOTRON_H_LETTERS)}")
    return [_NEMOTRON_H_LETTERS[letter] for letter in pattern]


def _nemotron_h_experts(fields: Fields) -> dict[str, Any]:
    num_experts = fields.size("n_routed_experts", default=8)
    groups = fields.size("n_group", default=1)
    if num_experts % groups or num_experts < 2 * groups:
        raise fields.wrong("n_group", f"a divisor of {num_experts} experts, two or more in each group")
    best = fields.size("topk_group", default=1, most=groups)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=2, most=best * num_experts // groups),
        "n_group": groups,
        "topk_group": best,
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=7688),
        "moe_shared_expert_intermediate_size": fields.size("moe_shared_expert_intermediate_size", default=7688),
        "moe_latent_size": fields.size("moe_latent_size", default=0),
        "routed_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
    }


# Of experts, which are stacked, and their router.
_GRANITE_NAMES: Final = TensorNames(
    renamed=(
        (r"\.block_sparse_moe\.input_linear\.weight$", f".block_sparse_moe.experts.{GATE_UP}"),
        (r"\.block_sparse_moe\.output_linear\.weight$", f".block_sparse_moe.experts.{DOWN}"),
        (r"\.router\.layer\.weight$", ".router.weight"),
    ),
    stacked_experts=True,
)
_GRANITE_FACTORS: Final = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _parse_granitemoehybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields.only("position_embedding_type", "rope", "nope")
    rope = fields.get("position_embedding_type") == "rope"
    values = hybrid_transformer(kind, fields if rope else fields.dropped(*ROPE_FIELDS), _mamba_or_attention(fields))
    num_experts = count_of(fields, "num_local_experts", default=8)
    values["extra"] |= {
        **bamba_mixer(fields, expanded(fields)),
        **{name: factor(fields, name) for name in _GRANITE_FACTORS},
        "position_embedding_type": "rope" if rope else "nope",
        "shared_intermediate_size": fields.size("shared_intermediate_size", default=1024),
        "num_experts": num_experts,
    }
    if num_experts:
        per_tok = fields.size("num_experts_per_tok", default=2, most=num_experts)
        values["extra"]["num_experts_per_tok"] = per_tok
    return values


def _mamba_or_attention(fields: Fields) -> list[str]:
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            types = listed_layers(fields, name, (MAMBA, FULL))
            if len(types) != num_layers:
                raise fields.wrong(name, f"a list of {num_layers}")
            return types
    return [MAMBA] * num_layers


_MAMBA_NAMES: Final = TensorNames(renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),))
_MAMBA_POSITIONS: Final = 1 << 17
"""Positions of a model whose configuration has no limit, since its state has no room for one: 131,072. The published
ones were trained on 2,048 to 8,192 tokens, so that it is memory for the page tables, not the model, that this bounds.
"""


def _parse_mamba2(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _mixers_only(kind, fields)
    heads, head_dim = fields.size("num_heads", default=128), fields.size("head_dim", default=64)
    intermediate = fields.size("expand", default=2, most=1024) * values["hidden_size"]
    if heads * head_dim != intermediate:
        raise fields.wrong("num_heads", f"such that with a head_dim of {head_dim} there are {intermediate} channels")
    values["extra"] |= {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups_of(fields, "n_groups", heads, default=8),
        "mamba_d_state": fields.size("state_size", default=128),
        "time_step_limit": step_limit(fields),
    }
    return values


def _parse_mamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _mixers_only(kind, fields)
    hidden_size = values["hidden_size"]
    intermediate = fields.size("expand", default=2, most=1024) * hidden_size
    values["extra"] |= {
        "mamba_intermediate_size": fields.size("intermediate_size", default=intermediate),
        "mamba_d_state": fields.size("state_size", default=16),
        "mamba_dt_rank": rank_of(fields, "time_step_rank", hidden_size),
    }
    return values


def _parse_falcon_mamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _parse_mamba(kind, fields)
    values["extra"]["mixer_rms_eps"] = fields.number("mixer_rms_eps", default=1e-6)
    return values


def _mixers_only(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """Models without attention, and without anything else but mixers."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "intermediate_size": 0,
        "num_layers": num_layers,
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "max_position_embeddings": fields.size("max_position_embeddings", default=_MAMBA_POSITIONS),
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "rope_theta": 0.0,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=kind.tied),
        "extra": {
            "layer_types": [MAMBA] * num_layers,
            "mamba_d_conv": kernel_width(fields, "conv_kernel"),
            "mamba_conv_bias": fields.flag("use_conv_bias", default=True),
            "mamba_proj_bias": fields.flag("use_bias", default=False),
        },
    }


_BAMBA_ROTATED: Final = 0.5


def _parse_bamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """Half of each head is rotated, whatever the file says in transformers, so that it must say nothing else."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = set(fields.ints("attn_layer_indices", default=[]))
    layers = [FULL if layer in attention else MAMBA for layer in range(num_layers)]
    share, whole = without_partial_rotary(fields, default=_BAMBA_ROTATED)
    if share != _BAMBA_ROTATED:
        raise fields.wrong("partial_rotary_factor", f"{_BAMBA_ROTATED}, not {share}")
    values = hybrid_transformer(kind, whole, layers)
    if values["head_dim"] % 4:
        raise fields.wrong("head_dim", "a multiple of 4: the rotated half pairs its halves")
    values["extra"] |= bamba_mixer(fields, expanded(fields))
    return values


def _parse_jamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = _every(fields, num_layers, "attn_layer", period=8, offset=4)
    layers = [FULL if layer in attention else MAMBA for layer in range(num_layers)]
    values = hybrid_transformer(kind, fields.dropped(*ROPE_FIELDS), layers)
    num_experts = fields.size("num_experts", default=16)
    with_experts = _every(fields, num_layers, "expert_layer", period=2, offset=1) if num_experts > 1 else []
    values["extra"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=2, most=max(2, num_experts)),
        "expert_layers": with_experts,
        "mamba_intermediate_size": expanded(fields),
        "mamba_d_state": fields.size("mamba_d_state", default=16),
        "mamba_d_conv": kernel_width(fields, "mamba_d_conv"),
        "mamba_dt_rank": rank_of(fields, "mamba_dt_rank", values["hidden_size"]),
        "mamba_conv_bias": fields.flag("mamba_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("mamba_proj_bias", default=False),
    }
    return values


def _every(fields: Fields, num_layers: int, name: str, *, period: int, offset: int) -> list[int]:
    """The layers i with i % `name`_period == `name`_offset."""
    period = fields.size(f"{name}_period", default=period)
    offset = count_of(fields, f"{name}_offset", default=offset)
    if offset >= period:
        raise fields.wrong(f"{name}_offset", f"less than {name}_period, {period}")
    return list(range(offset, num_layers, period))


def _parse_zamba2(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields.only("hidden_act", "gelu")
    if not fields.flag("tie_word_embeddings", default=True):
        raise fields.wrong("tie_word_embeddings", "true: without it transformers ties the shared blocks neither")
    if fields.flag("use_long_context", default=False):
        raise fields.wrong("use_long_context", "false: another base of the rotary embedding is not supported")
    if fields.get("layers_block_type") is None:
        raise fields.wrong("layers_block_type", f"a list of {MAMBA} and {HYBRID}")
    layers = listed_layers(fields, "layers_block_type", (MAMBA, HYBRID))
    hybrids = [i for i, layer in enumerate(layers) if layer == HYBRID]
    if fields.get("hybrid_layer_ids", hybrids) != hybrids:
        raise fields.wrong(
            "hybrid_layer_ids", f"{hybrids}: the order in which the shared blocks are used is that of layers"
        )
    if len(layers) != fields.size("num_hidden_layers"):
        raise fields.wrong("num_hidden_layers", f"{len(layers)}, as many as there are types")
    rope = fields.flag("use_mem_rope", default=False)
    hidden_size = fields.size("hidden_size")
    changed = {
        "hidden_act": None,
        "intermediate_size": fields.size("intermediate_size", default=4 * hidden_size),
        "head_dim": _zamba2_head_dim(fields),
        "mlp_bias": fields.flag("add_bias_linear", default=False),
    }
    values = hybrid_transformer(kind, fields if rope else fields.dropped(*ROPE_FIELDS), layers, **changed)
    values["extra"] |= {
        **_zamba2_mixer(fields),
        "use_mem_rope": rope,
        "num_mem_blocks": fields.size("num_mem_blocks", default=1),
        "adapter_rank": fields.size("adapter_rank", default=128),
        "use_shared_attention_adapter": _zamba2_adapters(fields, values),
    }
    return values


def _zamba2_mixer(fields: Fields) -> dict[str, Any]:
    heads, intermediate = fields.size("n_mamba_heads", default=8), expanded(fields)
    if intermediate % heads or fields.get("mamba_headdim") not in (None, intermediate // heads):
        raise fields.wrong("n_mamba_heads", f"a divisor of {intermediate} channels, and mamba_headdim what is left")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": intermediate // heads,
        "mamba_n_groups": groups_of(fields, "mamba_ngroups", heads, default=1),
        "mamba_d_state": fields.size("mamba_d_state", default=64),
        "mamba_d_conv": kernel_width(fields, "mamba_d_conv"),
        "mamba_conv_bias": True,
        "mamba_proj_bias": fields.flag("add_bias_linear", default=False),
        # What transformers computes a prompt with.
        "time_step_limit": (fields.number("time_step_min", default=0.001), math.inf),
    }


def _zamba2_head_dim(fields: Fields) -> int:
    """Attention's input is twice as wide as the model."""
    name = "head_dim" if fields.get("attention_head_dim") is None else "attention_head_dim"
    width = 2 * fields.size("hidden_size")
    if fields.get("attention_hidden_size") not in (None, width):
        raise fields.wrong("attention_hidden_size", f"{width}")
    return fields.size(name, default=max(1, width // fields.size("num_attention_heads")))


def _zamba2_adapters(fields: Fields, values: Mapping[str, Any]) -> bool:
    """Whether q, k and v have adapters, which are all as wide as the attention's input."""
    adapters = fields.flag("use_shared_attention_adapter", default=False)
    width = 2 * values["hidden_size"]
    if adapters and any(values[heads] * values["head_dim"] != width for heads in ("num_heads", "num_kv_heads")):
        raise fields.wrong("use_shared_attention_adapter", f"false: q, k and v are not all {width} wide")
    return adapters


# Published files of these types name code of their own, from before transformers had it. It is not run here either.
_OWN_CODE: Final = frozenset({"auto_map"})
# How transformers computes, what it trains with, and how it makes weights that are not in a file.
_KERNELS: Final = frozenset(
    {"chunk_size", "mamba_chunk_size", "use_associative_scan", "use_mamba_kernels", "use_mambapy", "use_mem_eff_path"}
)
_INITIAL: Final = frozenset({"time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_scale"})
_MIXERS: Final = _KERNELS | _INITIAL | {"residual_in_fp32", "time_step_min"}
_ZAMBA2: Final = _KERNELS | _INITIAL | {"kv_channels", "num_query_groups", "use_conv_bias"}
# What the shapes of weights and other fields say already.
_NEMOTRON_H: Final = frozenset(
    {
        "expand",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
        "n_shared_experts",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_limit",
    }
)

TYPES: Final[Mapping[str, ModelType]] = {
    "falcon_h1": ModelType(rms_norm_eps=1e-5, parse=_parse_falcon_h1, harmless=_KERNELS | {"mamba_expand"}),
    "granitemoehybrid": ModelType(
        kv_heads_default=True,
        parse=_parse_granitemoehybrid,
        harmless=_KERNELS,
        names=_GRANITE_NAMES,
    ),
    "bamba": ModelType(rms_norm_eps=1e-5, parse=_parse_bamba, harmless=_KERNELS | {"z_loss_coefficient"}),
    "jamba": ModelType(harmless=_OWN_CODE | _KERNELS, parse=_parse_jamba),
    "zamba2": ModelType(kv_heads_default=True, rms_norm_eps=1e-5, tied=True, parse=_parse_zamba2, harmless=_ZAMBA2),
    "mamba": ModelType(tied=True, parse=_parse_mamba, harmless=_MIXERS, names=_MAMBA_NAMES),
    "mamba2": ModelType(parse=_parse_mamba2, harmless=_MIXERS | {"time_step_rank"}, names=_MAMBA_NAMES),
    "falcon_mamba": ModelType(tied=True, parse=_parse_falcon_mamba, harmless=_MIXERS, names=_MAMBA_NAMES),
    "nemotron_h": ModelType(
        head_dim=128,
        harmless=_OWN_CODE | _KERNELS | _INITIAL | _NEMOTRON_H,
        parse=_parse_nemotron_h,
        names=_NEMOTRON_H_NAMES,
    ),
}
