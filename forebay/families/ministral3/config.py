from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.parts.query_scale import QueryScale, query_scale, without_query_scale
from forebay.families.shape import Shape
from forebay.families.transformer import Defaults, Windows, transformer

# Where a file has no rope, as transformers 5.24 has it.
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


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
