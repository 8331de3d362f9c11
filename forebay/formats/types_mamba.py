"""Models with Mamba mixers, in transformers' names where the families agree, and in Bamba's where they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.formats.config_fields import Fields
from forebay.formats.model_type import FULL, ModelType, parse_transformer

MAMBA: Final = "linear_attention"
HYBRID: Final = "hybrid"
MLP: Final = "mlp"
MOE: Final = "moe"

# What configurations of before transformers 5 call the types of layers.
_OLD_LAYER_TYPES: Final = {"mamba": MAMBA, "attention": FULL}

_MAX_LAYERS: Final = 4096
_MAX_WIDTH: Final = 8  # the native convolution's
_INFINITY: Final = {"__float__": "Infinity"}  # how transformers writes it


def _bamba_mixer(fields: Fields, intermediate: int) -> dict[str, Any]:
    """The names that Bamba gave a Mamba-2 mixer's fields; Falcon-H1 and Granite have them too."""
    heads = fields.size("mamba_n_heads", default=128)
    if intermediate % heads:
        raise fields.wrong("mamba_n_heads", f"a divisor of the mixer's {intermediate} channels")
    auto = fields.raw.get("mamba_d_head") in (None, "auto")
    head_dim = intermediate // heads if auto else fields.size("mamba_d_head")
    if heads * head_dim != intermediate:
        raise fields.wrong("mamba_d_head", f"{intermediate // heads}: {intermediate} channels for {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": _groups(fields, "mamba_n_groups", heads, default=1),
        "mamba_d_state": fields.size("mamba_d_state", default=256),
        "mamba_d_conv": _width(fields, "mamba_d_conv"),
        "mamba_conv_bias": fields.flag("mamba_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("mamba_proj_bias", default=False),
        "time_step_limit": _dt_limit(fields),
    }


def _groups(fields: Fields, name: str, heads: int, *, default: int) -> int:
    groups = fields.size(name, default=default)
    if heads % groups:
        raise fields.wrong(name, f"a divisor of the mixer's {heads} heads")
    return groups


def _expanded(fields: Fields) -> int:
    return fields.size("mamba_expand", default=2, most=1024) * fields.size("hidden_size")


def _width(fields: Fields, name: str) -> int:
    width = fields.size(name, default=4, most=_MAX_WIDTH)
    if width < 2:
        raise fields.wrong(name, "at least 2")
    return width


def _dt_limit(fields: Fields) -> tuple[float, float]:
    given = fields.raw.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    values = [math.inf if item == _INFINITY else item for item in given] if isinstance(given, list | tuple) else []
    if len(values) != 2 or not all(_is_number(item) for item in values) or not 0 <= values[0] <= values[1]:
        raise fields.wrong("time_step_limit", "a lower and an upper bound, of at least 0")
    return float(values[0]), float(values[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _factor(fields: Fields, name: str) -> float:
    return _factors(fields, name, 1)[0] if fields.raw.get(name) is not None else 1.0


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Multipliers: a list of `count`, where there is more than one; each 1 where the file is silent."""
    given = fields.raw.get(name)
    values = [1.0] * count if given is None else [given] if count == 1 else given
    if not isinstance(values, list) or len(values) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    if not all(_is_number(value) and math.isfinite(value) and value for value in values):
        raise fields.wrong(name, "finite and not 0")
    return [float(value) for value in values]


def _listed_layers(fields: Fields, name: str, known: Sequence[str]) -> list[str]:
    given = fields.raw[name]
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise fields.wrong(name, "a list of layer types")
    types = [str(_OLD_LAYER_TYPES.get(item, item)) for item in given]
    if not 0 < len(types) <= _MAX_LAYERS or not set(types) <= set(known):
        raise fields.wrong(name, f"a list of {', '.join(known)}")
    return types


def _only(fields: Fields, name: str, *values: str) -> None:
    if fields.raw.get(name) not in (None, *values):
        raise fields.wrong(name, " or ".join(values))


def _transformer(kind: ModelType, fields: Fields, layer_types: Sequence[str], **renamed: Any) -> dict[str, Any]:
    """As a plain transformer, but for the layers' types; `renamed` are fields under the names that those have."""
    raw = {name: value for name, value in fields.raw.items() if name not in ("layer_types", "layers_block_type")}
    values = parse_transformer(kind, Fields({**raw, **renamed}, fields.where))
    values["extra"]["layer_types"] = list(layer_types)
    return values


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
    values = _transformer(kind, fields, [HYBRID] * fields.size("num_hidden_layers", most=_MAX_LAYERS))
    expanded = "mamba_d_ssm" in fields.raw and fields.raw["mamba_d_ssm"] is None
    intermediate = _expanded(fields) if expanded else fields.size("mamba_d_ssm", default=1024)
    values["extra"] |= {
        **_bamba_mixer(fields, intermediate),
        **{name: _factor(fields, name) for name in _FALCON_H1_FACTORS},
        "mlp_multipliers": _factors(fields, "mlp_multipliers", 2),
        "ssm_multipliers": _factors(fields, "ssm_multipliers", 5),
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
_NEMOTRON_H_LETTERS: Final = {"M": MAMBA, "E": MOE, "*": FULL, "-": MLP}
_NO_ROPE: Final = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None}


def _parse_nemotron_h(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = _renamed(fields, _OLD_NEMOTRON_H_NAMES)
    _only(fields, "mlp_hidden_act", "relu2")
    _only(fields, "mamba_hidden_act", "silu")
    layers = _nemotron_h_layers(fields)
    eps = fields.number("layer_norm_epsilon", default=1e-5)
    inner = fields.size("intermediate_size", default=21504)
    sizes = {"num_hidden_layers": len(layers), "rms_norm_eps": eps, "intermediate_size": inner}
    values = _transformer(kind, fields, layers, **sizes, **_NO_ROPE)
    heads = fields.size("mamba_num_heads", default=128)
    values["tie_word_embeddings"] = False
    values["extra"] |= {
        "mamba_n_heads": heads,
        "mamba_d_head": fields.size("mamba_head_dim", default=64),
        "mamba_n_groups": _groups(fields, "n_groups", heads, default=8),
        "mamba_d_state": fields.size("ssm_state_size", default=128),
        "mamba_d_conv": _width(fields, "conv_kernel"),
        "mamba_conv_bias": fields.flag("use_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("use_bias", default=False),
        # What transformers computes a prompt with; its own field time_step_limit has no effect there.
        "time_step_limit": (fields.number("time_step_min", default=0.001), math.inf),
    }
    if MOE in layers:
        values["extra"] |= _nemotron_h_experts(fields)
    return values


def _nemotron_h_layers(fields: Fields) -> list[str]:
    for name in ("layers_block_type", "layer_types"):
        if fields.raw.get(name) is not None:
            return _listed_layers(fields, name, (MAMBA, FULL, MLP, MOE))
    pattern = fields.raw.get("hybrid_override_pattern")
    if pattern is None:
        return [MAMBA, MOE, FULL, MLP]
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _MAX_LAYERS or set(pattern) - set(_NEMOTRON_H_LETTERS):
        raise fields.wrong("hybrid_override_pattern", f"of the letters {''.join(_NEMOTRON_H_LETTERS)}")
    return [_NEMOTRON_H_LETTERS[letter] for letter in pattern]


def _nemotron_h_experts(fields: Fields) -> dict[str, Any]:
    num_experts = fields.size("n_routed_experts", default=8)
    if fields.size("n_group", default=1) != 1:
        raise fields.wrong("n_group", "1: experts in groups are not supported")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=2, most=num_experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=7688),
        "moe_shared_expert_intermediate_size": fields.size("moe_shared_expert_intermediate_size", default=7688),
        "moe_latent_size": fields.size("moe_latent_size", default=0),
        "routed_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
    }


def _renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Old names count where they are there, as in transformers."""
    found = {new: fields.raw[old] for old, new in names.items() if old in fields.raw}
    return Fields({**fields.raw, **found}, fields.where)


_GRANITE_FACTORS: Final = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _parse_granitemoehybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    _only(fields, "position_embedding_type", "rope", "nope")
    rope = fields.raw.get("position_embedding_type") == "rope"
    values = _transformer(kind, fields, _mamba_or_attention(fields), **({} if rope else _NO_ROPE))
    num_experts = _count(fields, "num_local_experts", default=8)
    values["extra"] |= {
        **_bamba_mixer(fields, _expanded(fields)),
        **{name: _factor(fields, name) for name in _GRANITE_FACTORS},
        "position_embedding_type": "rope" if rope else "nope",
        "shared_intermediate_size": fields.size("shared_intermediate_size", default=1024),
        "num_experts": num_experts,
    }
    if num_experts:
        per_tok = fields.size("num_experts_per_tok", default=2, most=num_experts)
        values["extra"]["num_experts_per_tok"] = per_tok
    return values


def _mamba_or_attention(fields: Fields) -> list[str]:
    num_layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
    for name in ("layer_types", "layers_block_type"):
        if fields.raw.get(name) is not None:
            types = _listed_layers(fields, name, (MAMBA, FULL))
            if len(types) != num_layers:
                raise fields.wrong(name, f"a list of {num_layers}")
            return types
    return [MAMBA] * num_layers


def _count(fields: Fields, name: str, *, default: int) -> int:
    """A size that may be 0."""
    return 0 if fields.raw.get(name) == 0 else fields.size(name, default=default)


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
        "mamba_n_groups": _groups(fields, "n_groups", heads, default=8),
        "mamba_d_state": fields.size("state_size", default=128),
        "time_step_limit": _dt_limit(fields),
    }
    return values


def _parse_mamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _mixers_only(kind, fields)
    hidden_size = values["hidden_size"]
    intermediate = fields.size("expand", default=2, most=1024) * hidden_size
    values["extra"] |= {
        "mamba_intermediate_size": fields.size("intermediate_size", default=intermediate),
        "mamba_d_state": fields.size("state_size", default=16),
        "mamba_dt_rank": _rank(fields, "time_step_rank", hidden_size),
    }
    return values


def _parse_falcon_mamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _parse_mamba(kind, fields)
    values["extra"]["mixer_rms_eps"] = fields.number("mixer_rms_eps", default=1e-6)
    return values


def _rank(fields: Fields, name: str, hidden_size: int) -> int:
    return math.ceil(hidden_size / 16) if fields.raw.get(name) in (None, "auto") else fields.size(name)


def _mixers_only(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """Models without attention, and without anything else but mixers."""
    num_layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
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
            "mamba_d_conv": _width(fields, "conv_kernel"),
            "mamba_conv_bias": fields.flag("use_conv_bias", default=True),
            "mamba_proj_bias": fields.flag("use_bias", default=False),
        },
    }


_BAMBA_ROTATED: Final = 0.5


def _parse_bamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """Half of each head is rotated, whatever the file says in transformers, so that it must say nothing else."""
    num_layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
    attention = set(fields.ints("attn_layer_indices", default=[]))
    layers = [FULL if layer in attention else MAMBA for layer in range(num_layers)]
    values = _transformer(kind, _without_share(fields, _BAMBA_ROTATED), layers)
    if values["head_dim"] % 4:
        raise fields.wrong("head_dim", "a multiple of 4: the rotated half pairs its halves")
    values["extra"] |= _bamba_mixer(fields, _expanded(fields))
    return values


def _without_share(fields: Fields, share: float) -> Fields:
    """Without `partial_rotary_factor`, which is `share` where it is there."""
    raw = dict(fields.raw)
    rope = raw.get("rope_parameters")
    for holder in (raw, rope):
        if isinstance(holder, dict) and holder.get("partial_rotary_factor") not in (None, share):
            raise Fields(holder, fields.where).wrong("partial_rotary_factor", f"{share}")
    raw.pop("partial_rotary_factor", None)
    if isinstance(rope, dict):
        raw["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    return Fields(raw, fields.where)


def _parse_jamba(kind: ModelType, fields: Fields) -> dict[str, Any]:
    num_layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
    attention = _every(fields, num_layers, "attn_layer", period=8, offset=4)
    layers = [FULL if layer in attention else MAMBA for layer in range(num_layers)]
    values = _transformer(kind, fields, layers, **_NO_ROPE)
    num_experts = fields.size("num_experts", default=16)
    with_experts = _every(fields, num_layers, "expert_layer", period=2, offset=1) if num_experts > 1 else []
    values["extra"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=2, most=max(2, num_experts)),
        "expert_layers": with_experts,
        "mamba_intermediate_size": _expanded(fields),
        "mamba_d_state": fields.size("mamba_d_state", default=16),
        "mamba_d_conv": _width(fields, "mamba_d_conv"),
        "mamba_dt_rank": _rank(fields, "mamba_dt_rank", values["hidden_size"]),
        "mamba_conv_bias": fields.flag("mamba_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("mamba_proj_bias", default=False),
    }
    return values


def _every(fields: Fields, num_layers: int, name: str, *, period: int, offset: int) -> list[int]:
    """The layers i with i % `name`_period == `name`_offset."""
    period = fields.size(f"{name}_period", default=period)
    offset = _count(fields, f"{name}_offset", default=offset)
    if offset >= period:
        raise fields.wrong(f"{name}_offset", f"less than {name}_period, {period}")
    return list(range(offset, num_layers, period))


TYPES: Final[Mapping[str, ModelType]] = {
    "falcon_h1": ModelType(rms_norm_eps=1e-5, honours=frozenset({"embedding_multiplier"}), parse=_parse_falcon_h1),
    "granitemoehybrid": ModelType(
        kv_heads_default=True, honours=frozenset(_GRANITE_FACTORS), parse=_parse_granitemoehybrid
    ),
    "bamba": ModelType(rms_norm_eps=1e-5, parse=_parse_bamba),
    "jamba": ModelType(parse=_parse_jamba),
    "mamba": ModelType(tied=True, parse=_parse_mamba),
    "mamba2": ModelType(parse=_parse_mamba2),
    "falcon_mamba": ModelType(tied=True, parse=_parse_falcon_mamba),
    "nemotron_h": ModelType(head_dim=128, parse=_parse_nemotron_h),
}
