from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.model_config import Experts, Family, ModelConfig
from forebay.families.shape import Shape
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import Defaults, Windows, transformer

EXPERT_PARTS: Final = ("w1", "w3", "w2")
# transformers calls the layer's part as its other mixtures do.
NAMES: Final = TensorNames(
    renamed=((r"\.mlp\.", ".block_sparse_moe."),), stacked_experts=True, expert_parts=EXPERT_PARTS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtralConfig(ModelConfig):
    """A configuration with experts in every layer."""

    experts: Experts


def parse(fields: Fields) -> MixtralConfig:
    """Read Mixtral's fields: eight experts of the size of an MLP, and a window on every layer if the file has one."""
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=1e6, attention_bias=False)
    values = transformer(fields, defaults, windows=Windows(size=0, listed=False))
    return MixtralConfig(**values, experts=wide_experts(fields, values["intermediate_size"], number=8, per_token=2))


def wide_experts(fields: Fields, intermediate_size: int, *, number: int, per_token: int) -> Experts:
    """Read experts that have the size of an MLP, under either name of their number; the defaults are the type's."""
    number = fields.renamed({"num_experts": "num_local_experts"}).size("num_local_experts", default=number)
    return Experts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=per_token, most=number),
        intermediate_size=intermediate_size,
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts."""
    return {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, names=NAMES)
