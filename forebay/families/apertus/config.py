from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields, is_number
from forebay.families.base.mixers import Xielu
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer

ACTIVATIONS: Final = "xielu"
"""The field with the numbers of each layer's activation, which only GGUF files have in their metadata."""
_MAX: Final = 1e4
# Where a file has no rope, as transformers 5.24 has it.
_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ApertusConfig(ModelConfig):
    """`activations`: the numbers of each layer's xIELU, none if they are among the weights."""

    activations: tuple[Xielu, ...]


def parse(fields: Fields) -> ApertusConfig:
    """Read Apertus' fields: Llama's, with another activation and a scaled rope by default."""
    fields.only("hidden_act", "xielu")
    fields.only("qk_norm", True)
    fields.only("post_norm", False)
    fields.only("mlp_bias", False)
    activations = fields.get(ACTIVATIONS)
    if all(fields.get(name) is None for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        fields = fields.replaced(rope_parameters=_ROPE)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=_ROPE["rope_theta"])
    values = transformer(fields, defaults)
    return ApertusConfig(**values, activations=_numbers(fields, activations, values["num_layers"]))


def _numbers(fields: Fields, given: Any, num_layers: int) -> tuple[Xielu, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) != num_layers or not all(map(_is_xielu, given)):
        raise fields.wrong(ACTIVATIONS, f"a list of {num_layers}, each alpha_p, alpha_n, beta and eps")
    return tuple(Xielu(*map(float, numbers)) for numbers in given)


def _is_xielu(numbers: Any) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == len(Xielu._fields)
        and all(is_number(number) and abs(number) <= _MAX for number in numbers)
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: positions of 16 times the length that it was trained on."""
    return {"hidden_act": "xielu", "rope_parameters": {**_ROPE, "original_max_position_embeddings": 2048}}


FAMILY: Final = Family(parse=parse, small=small)
