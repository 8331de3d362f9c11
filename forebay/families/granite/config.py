from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.falcon_h1.config import multiplier
from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.shape import Shape
from forebay.families.transformer import Defaults, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Constants by which embeddings, attention scores and what each part adds are multiplied, and logits divided."""

    embedding: float
    attention: float
    residual: float
    logits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GraniteConfig(ModelConfig):
    """`shared_intermediate_size`: of the MLP that all tokens share beside experts, 0 for none."""

    multipliers: Multipliers
    shared_intermediate_size: int = 0


def parse(fields: Fields) -> GraniteConfig:
    """Read Granite's fields: Llama's, and four multipliers."""
    values = transformer(fields, Defaults(kv_heads=True, mlp_bias=True))
    return GraniteConfig(**values, multipliers=multipliers(fields))


def multipliers(fields: Fields) -> Multipliers:
    """Read the four multipliers. Raises ModelError for one that is 0 or no number."""
    return Multipliers(
        embedding=multiplier(fields, "embedding_multiplier"),
        attention=multiplier(fields, "attention_multiplier"),
        residual=multiplier(fields, "residual_multiplier"),
        logits=multiplier(fields, "logits_scaling"),
    )


def small_multipliers(shape: Shape) -> dict[str, Any]:
    """Return the multipliers of a small model: those of published ones."""
    return {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 1 / shape.head_dim,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }


FAMILY: Final = Family(parse=parse, small=small_multipliers)
