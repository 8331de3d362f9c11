"""Multipliers of embeddings, scores, residuals and logits, as Granite has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.families.base.fields import MAX_NUMBER, Fields, is_number
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import ModelConfig


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


def multiplier(fields: Fields, name: str) -> float:
    """Read a multiplier; 1 if the file has none."""
    given = fields.get(name)
    return _multipliers(fields, name, None if given is None else [given], 1)[0]


def _multipliers(fields: Fields, name: str, given: Any, count: int) -> tuple[float, ...]:
    values = [1.0] * count if given is None else given
    if not isinstance(values, list) or len(values) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    if not all(is_number(value) and 0 < abs(value) <= MAX_NUMBER for value in values):
        raise fields.wrong(name, "finite and not 0")
    return tuple(map(float, values))
