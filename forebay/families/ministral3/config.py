from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.query_scale import QueryScale, default_rope, query_scale, without_query_scale

_ROPE: Final = default_rope(theta=1e6, factor=16.0, length=16_384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ministral3Config(ModelConfig):
    """A configuration with a scale of queries by their position."""

    query_scale: QueryScale


def parse(fields: Fields) -> Ministral3Config:
    """Read Ministral 3's fields: Mistral's, with the scale of queries among the rope's parameters."""
    described, beta = without_query_scale(fields, _ROPE)
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, attention_bias=False)
    values = transformer(described, defaults, windows=Windows(size=0, listed=False))
    return Ministral3Config(**values, query_scale=query_scale(fields, beta, values["rope_scaling"]))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: positions of 16 times the length that it was trained on."""
    return {"rope_parameters": {**_ROPE, "original_max_position_embeddings": 2048}}


FAMILY: Final = Family(parse=parse, small=small)
