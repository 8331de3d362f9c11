from __future__ import annotations

from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family
from forebay.families.parts.own_code import OWN_CODE
from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.families.rope import rotary_dim, without_partial_rotary
from forebay.families.transformer import Defaults, Windows, transformer


def parse(fields: Fields) -> PartialRotaryConfig:
    """Read Phi-3's fields. Raises ModelError for scaled ropes, which transformers would take for LongRoPE."""
    share, whole = without_partial_rotary(fields, default=1.0)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, attention_bias=False)
    values = transformer(whole, defaults, windows=Windows(size=0, listed=False))
    if values["rope_scaling"] is not None:
        raise fields.wrong("rope_parameters", "of the default type: transformers takes any other for longrope")
    return PartialRotaryConfig(**values, rotary_dim=rotary_dim(fields, values["head_dim"], share))


FAMILY: Final = Family(parse=parse, harmless=OWN_CODE)
