from __future__ import annotations

from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family
from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.families.rope import rotary_dim, without_partial_rotary
from forebay.families.transformer import Defaults, transformer


def parse(fields: Fields) -> PartialRotaryConfig:
    """Read GLM-4's fields: half of each head is rotated by default, and queries, keys and values have a bias."""
    share, whole = without_partial_rotary(fields, default=0.5)
    values = transformer(whole, Defaults(head_dim=128, rms_norm_eps=1.5625e-7))
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    return PartialRotaryConfig(**values, rotary_dim=rotary_dim(fields, values["head_dim"], share))


FAMILY: Final = Family(parse=parse)
