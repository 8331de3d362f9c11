"""ModernBERT: rotary positions, norms in front of each part, and attention to near tokens alone in most layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.architecture import Architecture, Header, Tensors
from forebay.families.base.fields import Fields, is_number
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.parts.gguf.text_encoder import HEAD, LABELS, configure
from forebay.families.parts.text_encoder import (
    HARMLESS,
    Head,
    TextEncoderConfig,
    activation,
    encoder_fields,
    names_below,
)

_HARMLESS: Final = HARMLESS | {
    "classifier_dropout", "compile_mode", "decoder_bias", "deterministic_flash_attn", "embedding_dropout",
    "initializer_cutoff_factor", "mlp_dropout", "reference_compile", "repad_logits_with_grad",
    "sparse_pred_ignore_index", "sparse_prediction", "cls_token_id", "layer_norm_eps", "position_embedding_type",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModernBertConfig(TextEncoderConfig):
    """Layers of sliding attention see `reach` tokens to each side, and rotate with the base `local_theta`. `norm_bias`
    and `head_bias`: whether norms and the head's first layer have biases."""

    reach: int
    local_theta: float
    norm_bias: bool
    head_bias: bool
    head_activation: str


def _parse(fields: Fields) -> ModernBertConfig:
    own = fields.renamed({"norm_eps": "layer_norm_eps", "hidden_activation": "hidden_act"})
    if own.get("layer_norm_eps") is None:
        own = own.replaced(layer_norm_eps=1e-5)
    values = encoder_fields(own, positions=8192)
    if values["head_dim"] % 2:
        raise fields.wrong("num_attention_heads", "so many that a head's size is even")
    fields.only("classifier_pooling", "cls", "mean")
    window = fields.size("local_attention", default=128)
    values["layer_types"] = tuple(_layers(fields, values["num_layers"]))
    values["rope_theta"] = _theta(fields, FULL, "global_rope_theta", 160_000.0)
    return ModernBertConfig(
        **values,
        local_theta=_theta(fields, SLIDING, "local_rope_theta", 10_000.0),
        reach=window // 2,
        norm_bias=fields.flag("norm_bias", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        head_bias=fields.flag("classifier_bias", default=False),
        head_activation=activation(fields, "classifier_activation"),
        head_mean=fields.get("classifier_pooling") == "mean",
    )


def _layers(fields: Fields, count: int) -> list[str]:
    every = fields.size("global_attn_every_n_layers", default=3)
    if fields.get("layer_types") is not None:
        return fields.one_of_each("layer_types", count, (FULL, SLIDING))
    return [SLIDING if layer % every else FULL for layer in range(count)]


def _theta(fields: Fields, kind: str, name: str, default: float) -> float:
    """Return the base of the layers of a kind. Raises ModelError for a rope that is scaled."""
    fields.only("rope_scaling")
    ropes: Any = fields.get("rope_parameters", {})
    own: Any = ropes.get(kind) or {} if isinstance(ropes, dict) else {}
    given: Any = own.get("rope_theta", fields.get(name, default)) if isinstance(own, dict) else None
    if not is_number(given) or given <= 0 or own.get("rope_type", "default") != "default":
        raise fields.wrong("rope_parameters", f"a base without scaling for {kind}")
    return float(given)


def _unused(config: ModelConfig, name: str) -> bool:
    assert isinstance(config, TextEncoderConfig), config.model_type
    return name.startswith("head.") and config.head is Head.NONE


def _configure(header: Header) -> None:
    """Files name no pooling of a classifier: as in llama.cpp, and in published rerankers, it reads the mean."""
    configure(header)
    tensors = header.file.tensors
    header.config.pop("type_vocab_size")
    header.config.update(
        norm_bias="token_embd_norm.bias" in tensors,
        attention_bias="blk.0.attn_qkv.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        classifier_bias="cls.bias" in tensors,
        **({"classifier_pooling": "mean"} if HEAD in tensors else {}),
    )


def _without_idle_head(tensors: Tensors, config: Any) -> Tensors:
    """Return the tensors without those of a head that has no labels."""
    return {name: tensor for name, tensor in tensors.items() if not _unused(config, name)}


ARCHITECTURES: Final = {
    "modern-bert": Architecture(
        layers="layers",
        causal=False,
        top_names={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "cls": "head.dense",
            "cls.norm": "head.norm",
            "cls.output": "classifier",
        },
        block_names={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
            "ffn_norm": "mlp_norm",
        },
        keys={
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "hidden_activation": "hidden_activation",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        checked=(LABELS,),
        configure=_configure,
        reorder=_without_idle_head,
    ),
}
FAMILY: Final = Family(parse=_parse, harmless=_HARMLESS, names=names_below("model", "decoder."), unused=_unused)
