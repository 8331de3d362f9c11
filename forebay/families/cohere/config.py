from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.parts.parallel import HARMLESS, CohereConfig, parallel_transformer

_MOST_POSITIONS: Final = 1 << 24


def parse(fields: Fields) -> CohereConfig:
    """Read Command R's fields. Files name the length that a model was trained for besides that of its first steps."""
    values = parallel_transformer(fields, rope_theta=500_000.0)
    if values["rope_scaling"] is None:
        first = values["max_position_embeddings"]
        trained = fields.size("model_max_length", default=first, most=_MOST_POSITIONS)
        values["max_position_embeddings"] = max(first, trained)
    return CohereConfig(**values, use_qk_norm=fields.flag("use_qk_norm", default=False))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {"use_qk_norm": True, "logit_scale": 0.25}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS)
