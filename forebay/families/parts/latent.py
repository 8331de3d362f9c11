"""Latent attention, as DeepSeek V3 has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.mixers import Latent
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.transformer import FULL, Defaults, TransformerValues, transformer
from forebay.families.parts.experts import GroupedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(GroupedConfig):
    """A configuration of latent attention, and of experts in groups."""

    latent: Latent


def latent_transformer(fields: Fields, defaults: Defaults, latent: Latent) -> TransformerValues:
    """As a plain transformer; the size of a head is that of its rotated part, 2 if there is none."""
    fields = fields.replaced(head_dim=latent.rope_dim or 2, num_key_value_heads=None)
    return transformer(fields, defaults, layer_types=[FULL] * fields.size("num_hidden_layers", most=MAX_LAYERS))


def latent_attention(
    fields: Fields, *, q_rank: int, interleaved: bool, rank: int = 512, nope_dim: int = 128, value_dim: int = 128
) -> Latent:
    """Read the sizes of latent attention; the arguments are the type's defaults. A null as `q_lora_rank` means that
    queries come straight from the input."""
    no_q_rank = fields.is_null("q_lora_rank")
    return Latent(
        rank=fields.size("kv_lora_rank", default=rank),
        q_rank=0 if no_q_rank else fields.size("q_lora_rank", default=q_rank),
        nope_dim=fields.size("qk_nope_head_dim", default=nope_dim),
        rope_dim=fields.size("qk_rope_head_dim", default=64),
        value_dim=fields.size("v_head_dim", default=value_dim),
        interleaved=interleaved,
    )


def small_latent(shape: Shape) -> dict[str, Any]:
    """Latent attention, and experts behind the first layer."""
    return {
        "q_lora_rank": 2 * shape.head_dim,
        "kv_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "head_dim": 16,
        "num_key_value_heads": shape.num_heads,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": shape.hidden_size,
    }


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts in two groups."""
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    return {**small_latent(shape), **routing}


# Remote code in published files is what transformers has by now; heads of latent attention have no keys of their own;
# layers' MLPs may be listed instead of counted.
HARMLESS: Final = frozenset({"auto_map", "num_key_value_heads", "qk_head_dim", "first_k_dense_replace"})
# The layer behind the last one, with what joins the embedding to a hidden state.
DRAFT_HEAD: Final = (("model.layers.{0}.", "model.layers.{0}."),)
NAMES: Final = TensorNames(stacked_experts=True, draft_layers=True, draft_head=DRAFT_HEAD)
