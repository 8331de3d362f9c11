from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, layers_of
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.kimi_delta import NAMES, KimiLinearConfig, kimi_delta
from forebay.families.parts.latent import HARMLESS, latent_attention, latent_transformer, small_latent

_LINEAR_NAMES: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def parse(fields: Fields) -> KimiLinearConfig:
    """Read Kimi Linear's fields: latent attention without rotary embeddings, and a delta rule in the layers that
    `linear_attn_config` lists."""
    fields = fields.renamed(NAMES, nulls=True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
    fields.only("mla_use_nope", True)
    fields.only("tie_word_embeddings", False)
    latent = latent_attention(fields, q_rank=0, interleaved=False)
    values = latent_transformer(fields.dropped(*ROPE_FIELDS), Defaults(kv_heads=True, rms_norm_eps=1e-5), latent)
    linear = fields.under(fields.within("linear_attn_config").renamed(_LINEAR_NAMES))
    values["layer_types"] = tuple(layers_of(fields, _layers(linear, values["num_layers"])))
    return KimiLinearConfig(
        **values,
        latent=latent,
        experts=grouped_experts(fields, number=256, scale=2.446, inner=1024, groups=1, best_groups=1),
        delta=kimi_delta(linear, heads=32, head_dim=128),
        mlp_layer_types=mlp_layer_types(fields, values["num_layers"], dense=1),
    )


def _layers(fields: Fields, num_layers: int) -> list[str]:
    """Files list the layers of both kinds, and count from 1."""
    if not fields.has("full_attn_layers") or not fields.has("kda_layers"):
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    full, linear = fields.ints("full_attn_layers", default=[]), fields.ints("kda_layers", default=[])
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        raise fields.wrong("kda_layers", f"those of layers 1 to {num_layers} that full_attn_layers does not have")
    return [FULL if i + 1 in full else LINEAR for i in range(num_layers)]


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a delta rule, then one with attention."""
    return {
        **small_latent(shape),
        "layer_types": shape.cycle(*[LINEAR] * 3, FULL),
        "linear_num_heads": shape.num_heads,
        "linear_head_dim": shape.head_dim,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
    }


# Published files call experts so, and those that transformers writes the MLPs of other layers, too.
_TENSORS: Final = TensorNames(
    renamed=((r"\.block_sparse_moe\.", ".mlp."),), draft_layers=True, modules=((r"\.forget_gate\.", "."),)
)

FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS | {"head_dim"}, names=_TENSORS)
