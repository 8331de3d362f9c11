from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer

_ACTIVATIONS: Final = ("gelu", "gelu_pytorch_tanh")  # published files name the first and mean the second
_KV_HEADS: Final = 16


def parse(fields: Fields) -> ModelConfig:
    """Read Gemma's fields. Raises ModelError for attention in both directions."""
    fields.only("hidden_act", *_ACTIVATIONS)
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.wrong("use_bidirectional_attention", "false: tokens are served as they come")
    if not fields.has("num_key_value_heads"):
        fields = fields.replaced(num_key_value_heads=_KV_HEADS)
    return ModelConfig(**transformer(fields, Defaults(head_dim=256, tied=True)))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {"hidden_act": "gelu_pytorch_tanh"}


FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"hidden_activation"}))
