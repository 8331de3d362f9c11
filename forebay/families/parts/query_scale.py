"""Queries that are scaled by their position, as Llama 4 and Mistral's models have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from forebay.families.base.fields import Fields
from forebay.families.base.rope import rope_parameters

_BETA: Final = "llama_4_scaling_beta"
DEFAULT_BETA: Final = 0.1
_LENGTH: Final = "original_max_position_embeddings"


class QueryScale(NamedTuple):
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / length)); beta 0 for no scale."""

    beta: float
    length: int


def default_rope(*, theta: float, factor: float, length: int) -> dict[str, Any]:
    """Return the rope of a file that has none, as transformers 5.24 has it for Mistral's models: YaRN from `length`
    trained positions by `factor`, and a scale of queries."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        _LENGTH: length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _BETA: DEFAULT_BETA,
    }


def without_query_scale(fields: Fields, default: Mapping[str, Any]) -> tuple[Fields, float]:
    """Return the fields with the rope's parameters alone, which are `default` if the file has none, and beta, which
    stands among them."""
    rope = {**(rope_parameters(fields) or default)}
    scale = Fields({_BETA: rope.pop(_BETA, None)}, fields.where)
    rope.pop("max_position_embeddings", None)  # the model's, once more
    return fields.replaced(rope_parameters=rope, rope_scaling=None), scale.number(_BETA, default=0.0)


def query_scale(fields: Fields, beta: float, rope_scaling: Mapping[str, Any] | None) -> QueryScale:
    """Return the scale with the length that the model was trained on. Raises ModelError for a rope without it."""
    trained = Fields(rope_scaling or {}, f"{fields.where}: rope_parameters")
    return QueryScale(beta, trained.size(_LENGTH) if beta else 0)
