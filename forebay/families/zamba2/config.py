from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import Mamba2Mixer
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import LINEAR, Defaults, TransformerValues, kernel_width, transformer
from forebay.families.parts.mamba import INITIAL, KERNELS
from forebay.families.parts.mamba2 import HYBRID, Mamba2Config, expanded, groups_of, listed_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Zamba2Config(Mamba2Config):
    """`num_shared`: blocks of attention and MLP that take turns before the mixers of hybrid layers."""

    has_rope: bool
    num_shared: int
    adapter_rank: int
    adapters_on_attention: bool


def parse(fields: Fields) -> Zamba2Config:
    """Read Zamba2's fields: Mamba-2 layers, some of which also use one of few shared transformer blocks."""
    fields.only("hidden_act", "gelu")
    if not fields.flag("tie_word_embeddings", default=True):
        raise fields.wrong("tie_word_embeddings", "true: without it transformers ties the shared blocks neither")
    if fields.flag("use_long_context", default=False):
        raise fields.wrong("use_long_context", "false: another base of the rotary embedding is not supported")
    layers, rope, bias = _layer_types(fields), fields.flag("use_mem_rope", default=False), _bias(fields)
    changed = {
        "hidden_act": None,
        "intermediate_size": fields.size("intermediate_size", default=4 * fields.size("hidden_size")),
        "head_dim": _head_dim(fields),
        "mlp_bias": bias,
    }
    transformed = (fields if rope else fields.dropped(*ROPE_FIELDS)).replaced(**changed)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, tied=True, attention_bias=False, mlp_bias=True)
    values = transformer(transformed, defaults, layer_types=layers)
    return Zamba2Config(
        **values,
        mixer=_mixer(fields, bias),
        has_rope=rope,
        num_shared=fields.size("num_mem_blocks", default=1),
        adapter_rank=fields.size("adapter_rank", default=128),
        adapters_on_attention=_adapters(fields, values),
    )


def _bias(fields: Fields) -> bool:
    return fields.flag("add_bias_linear", default=False)


def _layer_types(fields: Fields) -> list[str]:
    if fields.get("layers_block_type") is None:
        raise fields.wrong("layers_block_type", f"a list of {LINEAR} and {HYBRID}")
    layers = listed_layers(fields, "layers_block_type", (LINEAR, HYBRID))
    hybrids = [i for i, layer in enumerate(layers) if layer == HYBRID]
    if fields.get("hybrid_layer_ids", hybrids) != hybrids:
        raise fields.wrong(
            "hybrid_layer_ids", f"{hybrids}: the order in which the shared blocks are used is that of layers"
        )
    if len(layers) != fields.size("num_hidden_layers"):
        raise fields.wrong("num_hidden_layers", f"{len(layers)}, the number of types")
    return layers


def _mixer(fields: Fields, bias: bool) -> Mamba2Mixer:
    heads, intermediate = fields.size("n_mamba_heads", default=8), expanded(fields)
    if intermediate % heads or fields.get("mamba_headdim") not in (None, intermediate // heads):
        raise fields.wrong("n_mamba_heads", f"a divisor of {intermediate} channels, and mamba_headdim the quotient")
    return Mamba2Mixer(
        num_heads=heads,
        head_dim=intermediate // heads,
        num_groups=groups_of(fields, "mamba_ngroups", heads, default=1),
        state_size=fields.size("mamba_d_state", default=64),
        width=kernel_width(fields, "mamba_d_conv"),
        bias=bias,
        conv_bias=True,
        out_bias=bias,
        # What transformers computes a prompt with.
        dt_limit=(fields.number("time_step_min", default=0.001), math.inf),
    )


def _head_dim(fields: Fields) -> int:
    """Attention's input is twice as wide as the model."""
    name = "head_dim" if fields.get("attention_head_dim") is None else "attention_head_dim"
    width = 2 * fields.size("hidden_size")
    if fields.get("attention_hidden_size") not in (None, width):
        raise fields.wrong("attention_hidden_size", f"{width}")
    return fields.size(name, default=max(1, width // fields.size("num_attention_heads")))


def _adapters(fields: Fields, values: TransformerValues) -> bool:
    """Return whether q, k and v have adapters, which are all as wide as the attention's input."""
    adapters = fields.flag("use_shared_attention_adapter", default=False)
    width = 2 * values["hidden_size"]
    if adapters and any(heads * values["head_dim"] != width for heads in (values["num_heads"], values["num_kv_heads"])):
        raise fields.wrong("use_shared_attention_adapter", f"false: q, k and v are not all {width} wide")
    return adapters


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: two mixers, then one with the shared block."""
    return {
        "layers_block_type": shape.cycle("mamba", "mamba", "hybrid"),
        "n_mamba_heads": 2 * shape.num_heads,
        "mamba_headdim": shape.head_dim,
        "mamba_ngroups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "adapter_rank": 16,
        "attention_head_dim": 2 * shape.head_dim,
        "num_key_value_heads": shape.num_heads,
    }


_HARMLESS: Final = KERNELS | INITIAL | {"kv_channels", "num_query_groups", "use_conv_bias"}

FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS)
