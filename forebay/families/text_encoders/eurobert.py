"""EuroBERT: Llama's layers, whose tokens see both sides (arXiv 2503.05500)."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gguf.text_encoder import configure
from forebay.families.parts.text_encoder import HARMLESS, Head, TextEncoderConfig, names_below, rotary_fields

_HARMLESS: Final = HARMLESS | {"classifier_pooling", "clf_pooling", "mask_token_id", "pretraining_tp", "auto_map"}


def _parse(fields: Fields) -> TextEncoderConfig:
    own = fields.renamed({"rms_norm_eps": "layer_norm_eps"})
    own = own.replaced(layer_norm_eps=own.get("layer_norm_eps") or 1e-5, hidden_act=own.get("hidden_act") or "silu")
    values = rotary_fields(own, positions=8192, types=0, theta=10_000.0)
    heads = fields.size("num_key_value_heads", default=values["num_heads"])
    if values["num_heads"] % heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {values['num_heads']}")
    pooling = fields.get("classifier_pooling", fields.get("clf_pooling", "late"))
    if values.get("head") is Head.TEXT and pooling not in ("bos", "mean"):
        raise fields.wrong("classifier_pooling", "bos or mean: a mean of labels is not served")
    return TextEncoderConfig(
        **{
            **values,
            "num_kv_heads": heads,
            "attention_bias": fields.flag("attention_bias", default=False),
            "mlp_bias": fields.flag("mlp_bias", default=False),
            "tie_word_embeddings": True,  # it has no head of words
            "head_mean": pooling == "mean",
        }
    )


def _configure(header: Header) -> None:
    configure(header)
    header.config.pop("type_vocab_size")
    header.config["head_dim"] = header.own.get("attention.key_length")
    header.config["hidden_act"] = "silu"


ARCHITECTURES: Final = {
    "eurobert": Architecture(
        layers="layers",
        causal=False,
        top_names={"token_embd": "embed_tokens", "output_norm": "norm"},
        block_names=PRE_NORM,
        configure=_configure,
    ),
}
FAMILY: Final = Family(parse=_parse, harmless=_HARMLESS, names=names_below("model", "lm_head."))
