from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import MSCALES, rope_parameters, rotary_dim, without_partial_rotary
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.idle_windows import without_idle_window
from forebay.families.parts.own_code import OWN_CODE
from forebay.families.parts.partial_rotary import PartialRotaryConfig

_LONG: Final = ("longrope", "su", "yarn")  # the last two are older names of the first, in files of this type
_TRAINED: Final = 4096
_LENGTH: Final = "original_max_position_embeddings"


def parse(fields: Fields) -> PartialRotaryConfig:
    """Read Phi-3's fields. Raises ModelError for a scaled rope other than LongRoPE."""
    fields.only("lm_head_bias", False)
    share, whole = without_partial_rotary(without_idle_window(fields), default=1.0)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, attention_bias=False)
    values = transformer(_with_long_rope(whole), defaults, windows=Windows(size=0, listed=False))
    return PartialRotaryConfig(**values, rotary_dim=rotary_dim(fields, values["head_dim"], share))


def _with_long_rope(fields: Fields) -> Fields:
    """Return the fields with LongRoPE under its one name, and with the length that it was trained on."""
    rope = dict(rope_parameters(fields))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "default":
        return fields
    if kind not in _LONG or not rope.keys().isdisjoint(MSCALES):
        raise fields.wrong("rope_parameters", f"of the type default or longrope, without {' and '.join(MSCALES)}")
    if fields.get(_LENGTH) is None:
        rope.setdefault(_LENGTH, _TRAINED)
    return fields.replaced(rope_parameters={**rope, "rope_type": "longrope"}, rope_scaling=None)


FAMILY: Final = Family(parse=parse, harmless=OWN_CODE | {"full_attn_mod", "interpolate_factor"})
