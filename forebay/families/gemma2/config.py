from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, transformer
from forebay.families.parts.caps import cap, pre_attention_scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma2Config(ModelConfig):
    """A configuration with the size whose root divides the scores, and with caps on scores and logits, 0 for none."""

    query_pre_attn_scalar: float
    scores_cap: float
    logits_cap: float


def parse(fields: Fields) -> Gemma2Config:
    """Read Gemma 2's fields: every second layer, from the first on, has a window by default."""
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.wrong("use_bidirectional_attention", "false: tokens are served as they come")
    windows = Windows(layers=lambda num_layers: range(0, num_layers, 2), required=True)
    return Gemma2Config(
        **transformer(fields, Defaults(head_dim=256, tied=True), windows=windows),
        query_pre_attn_scalar=pre_attention_scalar(fields),
        scores_cap=cap(fields, "attn_logit_softcapping", default=50.0),
        logits_cap=cap(fields, "final_logit_softcapping", default=30.0),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {
        "layer_types": shape.cycle(SLIDING, FULL),
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": shape.head_dim,
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"cache_implementation", "hidden_act"}))
