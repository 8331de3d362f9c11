from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.wide_experts import NAMES, MixtralConfig, wide_experts


def parse(fields: Fields) -> MixtralConfig:
    """Read Mixtral's fields: eight experts of the size of an MLP, and a window on every layer if the file has one."""
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=1e6, attention_bias=False)
    values = transformer(fields, defaults, windows=Windows(size=0, listed=False))
    return MixtralConfig(**values, experts=wide_experts(fields, values["intermediate_size"], number=8, per_token=2))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts."""
    return {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, names=NAMES)
