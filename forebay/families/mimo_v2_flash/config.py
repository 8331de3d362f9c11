from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import rope_theta_and_scaling, rotary_dim, without_partial_rotary
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, TransformerValues, Windows, transformer
from forebay.families.parts.experts import DENSE, SPARSE, GroupedExperts, grouped_experts

_VALUE_SCALE: Final = 0.707
_THETAS: Final = {FULL: 5_000_000.0, SLIDING: 10_000.0}
_ROTATED: Final = 0.334  # of a head
_ROPE_NAMES: Final = ("rope_parameters", "rope_scaling", "rope_theta", "swa_rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """A rotary embedding of the first `dim` dimensions of a head."""

    dim: int
    theta: float
    scaling: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MimoConfig(ModelConfig):
    """`num_kv_heads` are those of layers without a window; layers with one have twice as many. `ropes` are by the kind
    of a layer. `mlp_layer_types`: `dense` or `sparse` for each layer."""

    value_dim: int
    value_scale: float
    ropes: Mapping[str, Rope]
    experts: GroupedExperts
    mlp_layer_types: tuple[str, ...]


def parse(fields: Fields) -> MimoConfig:
    """Read MiMo's fields, as published and as transformers saves them: the first layer and every sixth have no window,
    and all but the first have experts, by default."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("n_shared_experts", 0)
    plain = _with_kinds(fields).without(*_ROPE_NAMES)
    defaults = Defaults(head_dim=192, rms_norm_eps=1e-5)
    values = transformer(plain, defaults, windows=Windows(size=129, layers=_windowed, required=True))
    _check_published(fields, values)
    if values["num_heads"] % (2 * values["num_kv_heads"]):
        raise fields.wrong("num_key_value_heads", f"half of a divisor of num_attention_heads, {values['num_heads']}")
    ropes = _ropes(fields, values["head_dim"], values["max_position_embeddings"])
    values |= {"rope_theta": ropes[FULL].theta, "rope_scaling": ropes[FULL].scaling}
    scale = (
        1.0 if fields.is_null("attention_value_scale") else fields.number("attention_value_scale", default=_VALUE_SCALE)
    )
    return MimoConfig(
        **values,
        value_dim=fields.size("v_head_dim", default=128),
        value_scale=scale,
        ropes=ropes,
        experts=grouped_experts(fields, number=256, scale=1.0, inner=2048, groups=1, best_groups=1, shared=0),
        mlp_layer_types=tuple(plain.one_of_each("mlp_layer_types", values["num_layers"], (DENSE, SPARSE))),
    )


def _windowed(num_layers: int) -> list[int]:
    return [i for i in range(1, num_layers) if (i + 1) % 6]


def _with_kinds(fields: Fields) -> Fields:
    """With transformers' lists in the place of the published ones, of zeros and ones, and with its window."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    dense_first = [DENSE] + [SPARSE] * (num_layers - 1)
    changes: dict[str, Any] = {"mlp_layer_types": fields.get("mlp_layer_types", dense_first)}
    for name, listed, kinds in (
        ("layer_types", "hybrid_layer_pattern", (FULL, SLIDING)),
        ("mlp_layer_types", "moe_layer_freq", (DENSE, SPARSE)),
    ):
        if fields.get(listed) is not None and fields.get(name) is None:
            numbers = fields.ints(listed, default=[])
            if len(numbers) != num_layers or not set(numbers) <= {0, 1}:
                raise fields.wrong(listed, f"a list of {num_layers}, each 0 or 1")
            changes[name] = [kinds[number] for number in numbers]
    if fields.get("sliding_window_size") is not None:
        # Tokens that a query sees besides itself.
        changes["sliding_window"] = fields.size("sliding_window_size", most=1 << 23) + 1
        fields = fields.dropped("sliding_window")
    return fields.replaced(**changes)


def _check_published(fields: Fields, values: TransformerValues) -> None:
    """Raise ModelError where a published file says something else than what all models of the type have."""
    fields.only("layernorm_epsilon", values["rms_norm_eps"])
    fields.only("swa_num_attention_heads", values["num_heads"])
    fields.only("swa_num_key_value_heads", 2 * values["num_kv_heads"])
    fields.only("swa_head_dim", values["head_dim"])
    fields.only("swa_v_head_dim", fields.get("v_head_dim", 128))
    fields.only("add_swa_attention_sink_bias", True)
    fields.only("add_full_attention_sink_bias", False)


def _ropes(fields: Fields, head_dim: int, max_positions: int) -> dict[str, Rope]:
    if fields.get("rope_scaling"):
        raise fields.wrong("rope_scaling", "absent: rope_parameters has an object for each kind of attention")
    thetas = {FULL: fields.get("rope_theta"), SLIDING: fields.get("swa_rope_theta")}
    published = {"rope_type": "default", "partial_rotary_factor": fields.get("partial_rotary_factor", _ROTATED)}
    given = fields.get("rope_parameters") or {
        kind: {**published, "rope_theta": theta or _THETAS[kind]} for kind, theta in thetas.items()
    }
    if (
        not isinstance(given, dict)
        or set(given) != set(_THETAS)
        or not all(isinstance(r, dict) for r in given.values())
    ):
        raise fields.wrong("rope_parameters", f"an object for each of {' and '.join(_THETAS)}")
    ropes = {}
    for kind, default_theta in _THETAS.items():
        is_plain = given[kind].get("rope_type", "default") == "default"
        of_kind = Fields({"rope_parameters": given[kind]}, f"{fields.where}: {kind}")
        share, whole = without_partial_rotary(of_kind, default=_ROTATED if is_plain else 1.0)
        theta, scaling = rope_theta_and_scaling(whole, default_theta=default_theta, max_positions=max_positions)
        ropes[kind] = Rope(dim=rotary_dim(whole, head_dim, share), theta=theta, scaling=scaling)
    return ropes


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: a layer without a window, then three with one."""
    return {
        "num_attention_heads": 2 * shape.num_heads,
        "v_head_dim": shape.head_dim // 2,
        "layer_types": shape.cycle(FULL, SLIDING, SLIDING, SLIDING),
        "sliding_window": WINDOW,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in _THETAS.items()
        },
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.hidden_size,
        "tie_word_embeddings": False,
    }


_NAMES: Final = TensorNames(
    renamed=((r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),),
    unused=("model.mtp.",),
    stacked_experts=True,
)

FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=frozenset({"attention_chunk_size", "attention_projection_layout", "auto_map", "hybrid_block_size"}),
    names=_NAMES,
)
