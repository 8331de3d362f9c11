from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import TRAINED_LENGTH, rope_parameters
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, layers_of
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.kimi_delta import NAMES, KimiLinearConfig, kimi_delta
from forebay.families.parts.latent import DRAFT_HEAD, HARMLESS, latent_attention, latent_transformer, small_latent

_SHORT_CONV: Final = {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def parse(fields: Fields) -> KimiLinearConfig:
    """Read a hybrid of Kimi delta attention and latent attention, under Bailing's names of the fields. Every
    `layer_group_size`-th layer has latent attention."""
    fields = fields.renamed(NAMES, nulls=True)
    fields.only("tie_word_embeddings", False)
    _check_rope(fields)
    latent = latent_attention(fields, q_rank=0, interleaved=True)
    values = latent_transformer(fields, Defaults(kv_heads=True, rope_theta=6_000_000.0), latent)
    # Where it is not a file of the model's makers, head_dim is what is rotated, and these are there as well.
    head_dim = fields.size("head_dim", default=128)
    own = fields if fields.has("linear_conv_kernel_dim") else fields.renamed(_SHORT_CONV)
    group = fields.size("layer_group_size", default=6)
    computed = [LINEAR if (i + 1) % group else FULL for i in range(values["num_layers"])]
    values["layer_types"] = tuple(layers_of(fields, computed))
    bound = _lower_bound(fields) if fields.flag("kda_safe_gate", default=True) else 0.0
    return KimiLinearConfig(
        **values,
        latent=latent,
        experts=grouped_experts(fields, number=512, scale=2.5, inner=768, groups=8, best_groups=4),
        delta=kimi_delta(own, heads=values["num_heads"], head_dim=head_dim, lower_bound=bound),
        mlp_layer_types=mlp_layer_types(fields, values["num_layers"], dense=2),
    )


def _check_rope(fields: Fields) -> None:
    rope = rope_parameters(fields)
    scaled = rope.get("rope_type", rope.get("type")) in TRAINED_LENGTH
    if scaled and rope.get("original_max_position_embeddings") is None:
        # transformers takes the length of another model, its default, where the file calls its own model_max_length.
        raise fields.wrong("rope_parameters", "with its original_max_position_embeddings")


def _lower_bound(fields: Fields) -> float:
    value = fields.get("kda_lower_bound")
    bound = -5.0 if value is None else value
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e3 < bound < 0:
        raise fields.wrong("kda_lower_bound", "a number below 0")
    return float(bound)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a delta rule, then one with attention."""
    return {
        **small_latent(shape),
        "head_dim": shape.head_dim,
        "layer_types": shape.cycle(*[LINEAR] * 3, FULL),
        "num_experts": 8,
        "num_experts_per_token": 2,
        "n_group": 2,
        "topk_group": 1,
        "tie_word_embeddings": False,
    }


_LAST_NORM: Final = ("model.layers.{0}.final_layernorm.", "model.layers.{0}.shared_head.norm.")
_MODULES: Final = (
    (r"\.self_attn\.o_proj$", ".attention.dense"),
    (r"\.self_attn\.(?:forget_gate\.)?", ".attention."),
)

FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=HARMLESS | {"short_conv_kernel_size"},
    names=TensorNames(draft_layers=True, draft_head=(_LAST_NORM, *DRAFT_HEAD), modules=_MODULES),
)
