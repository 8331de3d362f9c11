"""Kimi's delta rule beside latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import KimiDelta
from forebay.families.config.transformer import kernel_width
from forebay.families.parts.latent import LatentConfig

# What else than DeepSeek Kimi and Ling call a field.
NAMES: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiLinearConfig(LatentConfig):
    """A configuration of latent attention with the sizes of Kimi's delta rule."""

    delta: KimiDelta


def kimi_delta(fields: Fields, *, heads: int, head_dim: int, lower_bound: float = 0.0) -> KimiDelta:
    """Read the sizes of a delta rule; `heads` and `head_dim` are the type's defaults."""
    return KimiDelta(
        num_heads=fields.size("linear_num_heads", default=heads),
        head_dim=fields.size("linear_head_dim", default=head_dim),
        width=kernel_width(fields, "linear_conv_kernel_dim"),
        lower_bound=lower_bound,
    )
