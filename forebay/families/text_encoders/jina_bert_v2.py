"""Jina BERT v2: BERT with ALiBi instead of positions, and gated feed-forward layers (arXiv 2310.19923, section 3.1).

transformers 5.24 has no such type: the description is that of the code which the published checkpoints name, and of
llama.cpp's `jina-bert-v2`. Their `config.json` is of the type `bert` with `position_embedding_type` `alibi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.families.base.architecture import Architecture, Header
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gguf.text_encoder import EMBEDDINGS, KEYS, configure, no_head
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below, no_pooler

_HARMLESS: Final = HARMLESS | {"auto_map", "attn_implementation", "emb_pooler", "model_max_length"}
_MORE_NORMS: Final = "qk-post-norm"


def _parse(fields: Fields) -> TextEncoderConfig:
    fields.only("position_embedding_type", "alibi")
    fields.only("feed_forward_type", "geglu")
    fields.only("hidden_act", "gelu")
    code = fields.get("auto_map")
    if isinstance(code, Mapping) and any(_MORE_NORMS in str(name) for name in code.values()):
        raise fields.wrong("auto_map", f"other code than {_MORE_NORMS}, which has norms of queries and keys")
    return TextEncoderConfig(**encoder_fields(fields.without("position_embedding_type"), positions=8192, types=2))


def _configure(header: Header) -> None:
    configure(header)
    no_head(header)
    header.config.update(position_embedding_type="alibi", feed_forward_type="geglu")


ARCHITECTURES: Final = {
    "jina-bert-v2": Architecture(
        layers="encoder.layer",
        causal=False,
        top_names=EMBEDDINGS,
        block_names={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "mlp.gated_layers",
            "ffn_down": "mlp.wo",
            "layer_output_norm": "mlp.layernorm",
        },
        keys=KEYS,
        configure=_configure,
    ),
}
FAMILY: Final = Family(parse=_parse, harmless=_HARMLESS, names=names_below("bert", "cls."), unused=no_pooler)
