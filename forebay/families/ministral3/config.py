from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.rope import rope_parameters
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
_LENGTH: Final = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ministral3Config(ModelConfig):
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / length)): `query_beta`, 0 for no scale, and
    `query_length`."""

    query_beta: float
    query_length: int


def parse(fields: Fields) -> Ministral3Config:
    """Read Ministral 3's fields: Mistral's, with the scale of queries among the rope's parameters."""
    rope = {**(rope_parameters(fields) or _ROPE)}
    scale = Fields({"llama_4_scaling_beta": rope.pop("llama_4_scaling_beta", None)}, fields.where)
    rope.pop("max_position_embeddings", None)  # the model's, once more
    described = fields.replaced(rope_parameters=rope, rope_scaling=None)
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, attention_bias=False)
    values = transformer(described, defaults, windows=Windows(size=0, listed=False))
    beta = scale.number("llama_4_scaling_beta", default=0.0)
    trained = Fields(values["rope_scaling"] or {}, f"{fields.where}: rope_parameters")
    return Ministral3Config(**values, query_beta=beta, query_length=trained.size(_LENGTH) if beta else 0)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: positions of 16 times the length that it was trained on."""
    return {"rope_parameters": {**_ROPE, _LENGTH: 2048}}


FAMILY: Final = Family(parse=parse, small=small)
