from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import rotary_dim, without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.partial_rotary import PartialRotaryConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StableLmConfig(PartialRotaryConfig):
    """`parallel`: attention and MLP have the same input. `use_qk_norm`: each head of queries and keys has a
    LayerNorm."""

    parallel: bool
    use_qk_norm: bool


def parse(fields: Fields) -> StableLmConfig:
    """Read StableLM's fields. Queries, keys and values have biases or none has; no other linear layer has one."""
    share, whole = without_partial_rotary(fields, default=0.25)
    named = whole.without("rms_norm_eps").renamed({"layer_norm_eps": "rms_norm_eps"})
    values = transformer(named, Defaults(rms_norm_eps=1e-5, attention_bias=False))
    if values["head_dim"] * values["num_heads"] != values["hidden_size"]:
        raise fields.wrong("num_attention_heads", f"a divisor of hidden_size, {values['hidden_size']}")
    values["attention_bias"] = fields.flag("use_qkv_bias", default=False)
    return StableLmConfig(
        **values,
        rotary_dim=rotary_dim(fields, values["head_dim"], share),
        parallel=fields.flag("use_parallel_residual", default=False),
        use_qk_norm=fields.flag("qk_layernorm", default=False),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}


FAMILY: Final = Family(parse=parse, small=small)
