from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import ropes_by_kind
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, transformer
from forebay.families.parts.caps import pre_attention_scalar
from forebay.families.parts.ropes import Ropes
from forebay.families.parts.text_encoder import TextEncoderConfig, class_names

# Published files leave out what is as in the 4B model. They all have the other sizes: transformers' defaults of hidden
# size, MLP and layers describe no published model, so a file without these is refused.
_SIZES: Final = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3Config(ModelConfig):
    """A configuration with a rope for each kind of attention, and the size whose root divides the scores."""

    ropes: Ropes
    query_pre_attn_scalar: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3EncoderConfig(TextEncoderConfig):
    """An EmbeddingGemma, whose tokens see both sides; in layers with a window `reach` tokens to each."""

    ropes: Ropes
    query_pre_attn_scalar: float
    reach: int


def parse(fields: Fields) -> Gemma3Config | Gemma3EncoderConfig:
    """Read Gemma 3's fields: five layers of six have a window by default, and both kinds of layers have a rope of their
    own."""
    fields = fields.replaced(**{name: size for name, size in _SIZES.items() if fields.get(name) is None})
    fields.only("hidden_activation", "gelu_pytorch_tanh")

    def windowed(num_layers: int) -> list[int]:
        pattern = fields.size("sliding_window_pattern", default=6)
        return [i for i in range(num_layers) if (i + 1) % pattern]

    plain = fields.without("rope_parameters", "rope_scaling", "rope_theta")
    values = transformer(plain, Defaults(head_dim=256, tied=True), windows=Windows(layers=windowed, required=True))
    thetas = {FULL: fields.get("rope_theta") or 1e6, SLIDING: fields.get("rope_local_base_freq") or 1e4}
    ropes = ropes_by_kind(fields, thetas, scaled=FULL, max_positions=values["max_position_embeddings"])
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    scalar = pre_attention_scalar(fields)
    if not fields.flag("use_bidirectional_attention", default=False):
        return Gemma3Config(**values, ropes=ropes, query_pre_attn_scalar=scalar)
    if any("For" in name for name in class_names(fields)):
        raise fields.wrong("architectures", "Gemma3TextModel: a model that sees both sides has no head here")
    values["eos_token_ids"], reach = (), fields.size("sliding_window") // 2
    return Gemma3EncoderConfig(**values, ropes=ropes, query_pre_attn_scalar=scalar, activation="gelu_tanh", reach=reach)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a window, then one without."""
    return {
        "layer_types": shape.cycle(SLIDING, SLIDING, SLIDING, FULL),
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": shape.head_dim,
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"hidden_act", "_sliding_window_pattern"}))
