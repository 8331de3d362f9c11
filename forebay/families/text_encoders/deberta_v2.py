"""DeBERTa v2 and v3: BERT whose scores have a term for the distance of two tokens, from either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import (
    HARMLESS,
    TextEncoderConfig,
    activation,
    encoder_fields,
    names_below,
    no_pooler,
)

_HARMLESS: Final = HARMLESS | {"legacy", "pooler_dropout", "cls_dropout", "pooler_hidden_size", "padding_idx"}
_TERMS: Final = {"c2p", "p2c"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DebertaConfig(TextEncoderConfig):
    """`span`: distances up to it have an embedding, of which the table has twice as many; with `far` > 0 those above
    half of it share one by their logarithm. `normed_distances`: the embeddings pass through a norm. `shared_keys`: the
    layers of q and k project distances too. `has_positions`: embeddings have a term for the place in the text."""

    span: int
    far: int
    normed_distances: bool
    shared_keys: bool
    has_positions: bool
    head_activation: str


def _parse(fields: Fields) -> DebertaConfig:
    if not fields.flag("relative_attention", default=False):
        raise fields.wrong("relative_attention", "true")
    terms = fields.get("pos_att_type")
    listed = terms.split("|") if isinstance(terms, str) else terms if isinstance(terms, list | tuple) else []
    if {str(term).strip() for term in listed} != _TERMS:
        raise fields.wrong("pos_att_type", "c2p and p2c")
    fields.only("conv_kernel_size", 0)
    norm = str(fields.get("norm_rel_ebd") or "none")
    if norm not in ("none", "layer_norm"):
        raise fields.wrong("norm_rel_ebd", "none or layer_norm")
    own = fields.replaced(layer_norm_eps=fields.positive("layer_norm_eps", default=1e-7))
    values = encoder_fields(own.without("relative_attention", "pos_att_type"), positions=512)
    fields.only("embedding_size", values["hidden_size"])
    fields.only("attention_head_size", values["head_dim"])
    most = fields.get("max_relative_positions", -1)
    far = values["max_position_embeddings"] if most == -1 else fields.size("max_relative_positions")
    buckets = fields.get("position_buckets", -1)
    span = far if buckets == -1 else fields.size("position_buckets", least=2)
    values["num_types"] = fields.size("type_vocab_size", default=0, least=0)
    return DebertaConfig(
        **values,
        span=span,
        far=0 if buckets == -1 else far,
        normed_distances=norm == "layer_norm",
        shared_keys=fields.flag("share_att_key", default=False),
        has_positions=fields.flag("position_biased_input", default=True),
        head_activation=activation(fields, "pooler_hidden_act"),
    )


def _small(shape: Shape) -> dict[str, Any]:
    return {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 32, "norm_rel_ebd": "layer_norm"}


FAMILY: Final = Family(
    parse=_parse,
    small=_small,
    harmless=_HARMLESS,
    names=names_below("deberta", "lm_predictions.", "mask_predictions.", "cls."),
    unused=no_pooler,
)
