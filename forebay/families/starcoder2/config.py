from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, Windows, transformer


def parse(fields: Fields) -> ModelConfig:
    """Read StarCoder 2's fields: all layers have a window or none has one, and linear layers have biases by default."""
    fields.only("hidden_act", "gelu_pytorch_tanh")
    bias = fields.flag("use_bias", default=True)
    named = fields.without("rms_norm_eps").renamed({"norm_epsilon": "rms_norm_eps"})
    defaults = Defaults(rms_norm_eps=1e-5, tied=True)
    values = transformer(named, defaults, windows=Windows(size=0, listed=False))
    values["attention_bias"] = values["mlp_bias"] = bias
    return ModelConfig(**values)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {"hidden_act": "gelu_pytorch_tanh", "sliding_window": WINDOW}


# Files have these beside the names that transformers reads.
_HARMLESS: Final = frozenset(
    {"activation_function", "embedding_dropout", "layer_norm_epsilon", "mlp_type", "norm_type", "residual_dropout"}
)

FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS)
