"""DistilBERT: BERT without kinds of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below

_OURS: Final = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers", "activation": "hidden_act",
}  # fmt: skip
_DROPOUTS: Final = frozenset({"dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"})
_HEAD: Final = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")


def _parse(fields: Fields) -> TextEncoderConfig:
    own = fields.renamed(_OURS)
    if own.get("num_hidden_layers") is None:
        own = own.replaced(num_hidden_layers=6)
    return TextEncoderConfig(**encoder_fields(own.dropped("layer_norm_eps", "type_vocab_size"), positions=512))


# The sinusoids of `sinusoidal_pos_embds` are in the files, as a table.
FAMILY: Final = Family(
    parse=_parse, harmless=HARMLESS | _DROPOUTS, names=replace(names_below("distilbert"), unused=_HEAD)
)
