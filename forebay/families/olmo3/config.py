from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import ropes_by_kind
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, transformer
from forebay.families.parts.ropes import Ropes

_THETA: Final = 500_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo3Config(ModelConfig):
    """A configuration with a rope for each kind of attention."""

    ropes: Ropes


def parse(fields: Fields) -> Olmo3Config:
    """Read OLMo 3's fields. `rope_theta` and `rope_scaling` are of full attention, as in transformers."""
    plain = fields.without("rope_parameters", "rope_scaling", "rope_theta")
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5)
    values = transformer(plain, defaults, windows=Windows(layers=three_of_four, required=True))
    thetas = {FULL: fields.get("rope_theta", _THETA), SLIDING: _THETA}
    ropes = ropes_by_kind(fields, thetas, scaled=FULL, max_positions=values["max_position_embeddings"])
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    return Olmo3Config(**values, ropes=ropes)


def three_of_four(num_layers: int) -> list[int]:
    """Return the layers with a window if a file does not list them: all but each fourth."""
    return [i for i in range(num_layers) if (i + 1) % 4]


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a window, then one without."""
    return {"layer_types": shape.cycle(SLIDING, SLIDING, SLIDING, FULL), "sliding_window": WINDOW}


FAMILY: Final = Family(parse=parse, small=small)
