"""NomicBERT: rotary positions and gated feed-forward layers, without biases."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.architecture import Architecture, Header
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gguf.text_encoder import EMBEDDINGS, KEYS, configure, no_head
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, names_below, no_pooler, rotary_fields

_OURS: Final = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size", "n_layer":
    "num_hidden_layers", "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "moe_every_n_layers": (-1, 0),
    "causal": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,), "parallel_block": (False,),
    "prenorm": (False,), "qkv_proj_bias": (False,), "rotary_emb_fraction": (1, 1.0), "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (), "scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,),
    "use_rms_norm": (False,), "add_cross_attention": (False,), "reorder_and_upcast_attn": (False,),
}  # fmt: skip
_HARMLESS: Final = HARMLESS | {
    "attn_pdrop", "auto_map", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions",
    "mlp_type", "n_ctx", "pad_vocab_size_multiple", "rotary_scaling_factor", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn",
    "use_xentropy",
}  # fmt: skip
_GATED: Final[dict[str, str]] = {"swiglu": "silu", "geglu": "gelu"}


def _parse(fields: Fields) -> TextEncoderConfig:
    for name, values in _NEUTRAL.items():
        fields.only(name, *values)
    own = fields.renamed(_OURS)
    given = own.get("hidden_act", "silu")
    gated = own.replaced(hidden_act=_GATED.get(str(given), given))
    return TextEncoderConfig(**rotary_fields(gated, positions=2048, types=2, theta=1000.0))


def _configure(header: Header) -> None:
    configure(header)
    no_head(header)
    header.config["activation_function"] = "swiglu"


ARCHITECTURES: Final = {
    "nomic-bert": Architecture(
        layers="encoder.layers",
        causal=False,
        top_names={**EMBEDDINGS, "token_embd_norm": "emb_ln"},
        block_names={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        keys=KEYS,
        configure=_configure,
    ),
}
FAMILY: Final = Family(parse=_parse, harmless=_HARMLESS, names=names_below("nomic_bert", "cls."), unused=no_pooler)
