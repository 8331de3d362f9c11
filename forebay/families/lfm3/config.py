from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import ropes_by_kind
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, SLIDING, Defaults
from forebay.families.parts.convolution import CONV, LFM_NAMES, Lfm2Config, convolutional
from forebay.families.parts.ropes import Ropes

_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfm3Config(Lfm2Config):
    """A configuration with a rope for each kind of attention, and whether there are norms behind the parts and gates of
    heads."""

    ropes: Ropes
    use_sandwich_norm: bool
    use_attention_gate: bool


def parse(fields: Fields) -> Lfm3Config:
    """Read LFM3's fields: convolutions, attention and attention with a window, with a rope for each kind of
    attention."""
    fields = fields if fields.has("rms_norm_eps") else fields.renamed(LFM_NAMES)
    if fields.has("rope_theta") or fields.has("rope_scaling"):
        raise fields.wrong("rope_theta", "absent, and rope_scaling too: there is one for each kind of attention")
    computed = [_layer_type(i) for i in range(fields.size("num_hidden_layers", most=MAX_LAYERS))]
    defaults = Defaults(head_dim=128, rms_norm_eps=1e-5, tied=True)
    plain = fields.without("rope_parameters")
    values = convolutional(plain, defaults, computed, possible=(CONV, FULL, SLIDING), width=7)
    described = fields.replaced(rope_parameters=fields.get("rope_parameters") or _ROPES)
    thetas, positions = {FULL: 1e6, SLIDING: 1e6}, values["max_position_embeddings"]
    ropes = ropes_by_kind(described, thetas, scaled=FULL, max_positions=positions)
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    values["sliding_window"] = fields.size("sliding_window", default=256)
    return Lfm3Config(
        **values,
        ropes=ropes,
        use_sandwich_norm=fields.flag("use_sandwich_norm", default=True),
        use_attention_gate=fields.flag("use_attention_gate", default=True),
    )


def _layer_type(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer > 0 else CONV


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: a convolution, a window and full attention in turn."""
    return {"layer_types": shape.cycle(CONV, SLIDING, FULL), "sliding_window": WINDOW}


_NAMES: Final = TensorNames(modules=((r"\.self_attn\.g_proj$", ".self_attn.gate_proj"),))

FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"norm_eps"}), names=_NAMES)
