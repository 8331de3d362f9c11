"""Experts as wide as an MLP, as Mixtral has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, ModelConfig

EXPERT_PARTS: Final = ("w1", "w3", "w2")
# transformers calls the layer's part as its other mixtures do.
NAMES: Final = TensorNames(
    renamed=((r"\.mlp\.", ".block_sparse_moe."),), stacked_experts=True, expert_parts=EXPERT_PARTS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtralConfig(ModelConfig):
    """A configuration with experts in every layer."""

    experts: Experts


def wide_experts(fields: Fields, intermediate_size: int, *, number: int, per_token: int) -> Experts:
    """Read experts that have the size of an MLP, under either name of their number; the defaults are the type's."""
    number = fields.renamed({"num_experts": "num_local_experts"}).size("num_local_experts", default=number)
    return Experts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=per_token, most=number),
        intermediate_size=intermediate_size,
    )
