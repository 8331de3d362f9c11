"""Models with short convolutions and sliding windows: LFM2, LFM2 MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.formats.config_fields import MAX_SIZE, Fields
from forebay.formats.model_type import FULL, ModelType, parse_transformer

CONV: Final = "conv"

_LFM_NAMES: Final = {"norm_eps": "rms_norm_eps"}
# What the first LFM2 files call things; where there are both, transformers takes these.
_OLD_LFM2_NAMES: Final = {**_LFM_NAMES, "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}


def _parse_lfm2(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = _renamed(fields, _OLD_LFM2_NAMES)
    num_layers = fields.size("num_hidden_layers", most=4096)
    attention = fields.ints("full_attn_idxs", default=list(range(num_layers)))
    values = _parse_lfm(kind, fields, [FULL if i in attention else CONV for i in range(num_layers)])
    values["intermediate_size"] = _lfm2_intermediate_size(fields)
    return values


def _lfm2_intermediate_size(fields: Fields) -> int:
    """Two thirds of what the file says, times its multiplier, rounded up to a multiple: as the weights are."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiplier = fields.number("block_ffn_dim_multiplier", default=1.0)
    multiple = fields.size("block_multiple_of", default=256)
    adjusted = multiplier * int(2 * size / 3)
    if not 1 <= adjusted <= MAX_SIZE - multiple:
        raise fields.wrong("block_ffn_dim_multiplier", f"a factor that leaves {size} in bounds")
    return -(-int(adjusted) // multiple) * multiple


def _parse_lfm2_moe(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = _renamed(fields, _OLD_LFM2_NAMES)
    values = _parse_lfm(kind, fields, None)
    num_experts = fields.size("num_experts", default=32)
    values["extra"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=4, most=num_experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=1792),
        "num_dense_layers": _num_dense_layers(fields),
        "use_expert_bias": fields.flag("use_expert_bias", default=True),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
    }
    return values


def _num_dense_layers(fields: Fields) -> int:
    return 2 if fields.raw.get("num_dense_layers") is None else fields.size("num_dense_layers", default=0)


def _parse_lfm(kind: ModelType, fields: Fields, computed: Sequence[str] | None) -> dict[str, Any]:
    """`computed`: the kinds of layers of a file that does not list them; None where it has to."""
    values = parse_transformer(kind, _without(fields, "layer_types"))
    values["extra"] |= {
        "layer_types": _layer_types(fields, (CONV, FULL), computed),
        "conv_L_cache": _conv_width(fields, default=3),
        "conv_bias": fields.flag("conv_bias", default=False),
    }
    return values


def _conv_width(fields: Fields, *, default: int) -> int:
    width = fields.size("conv_L_cache", default=default, most=64)
    if width < 2:
        raise fields.wrong("conv_L_cache", "at least 2: a convolution over one token keeps nothing")
    return width


def _layer_types(fields: Fields, possible: Sequence[str], computed: Sequence[str] | None) -> list[str]:
    num_layers = fields.size("num_hidden_layers", most=4096)
    given = fields.raw.get("layer_types") or computed
    if not isinstance(given, list) or len(given) != num_layers or any(item not in possible for item in given):
        raise fields.wrong("layer_types", f"{num_layers} of {' or '.join(possible)}")
    return given


def _renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """With the values of the fields on the left under the names on the right."""
    there = {new: fields.raw[old] for old, new in names.items() if fields.raw.get(old) is not None}
    return Fields({**fields.raw, **there}, fields.where)


def _without(fields: Fields, *names: str) -> Fields:
    return Fields({name: value for name, value in fields.raw.items() if name not in names}, fields.where)


TYPES: Final[dict[str, ModelType]] = {
    "lfm2": ModelType(rms_norm_eps=1e-5, rope_theta=1_000_000.0, tied=True, parse=_parse_lfm2),
    "lfm2_moe": ModelType(rms_norm_eps=1e-5, rope_theta=1_000_000.0, tied=True, parse=_parse_lfm2_moe),
}
