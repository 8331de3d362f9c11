"""Configurations of text encoders: tokens attend to all tokens of their text, and nothing is kept of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypedDict

from forebay.base.errors import ModelError
from forebay.families.base.embedding import Dense, dense_layers, token_layers
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import rope_theta_and_scaling
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import FULL, LayerValues, common

MAX_LABELS: Final = 4096
_MAX_LABEL_CHARS: Final = 256
_ACTIVATIONS: Final = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
OLD_NORMS: Final = ((r"\.LayerNorm\.gamma$", ".LayerNorm.weight"), (r"\.LayerNorm\.beta$", ".LayerNorm.bias"))
"""Names in files that were converted from TensorFlow."""
HARMLESS: Final = frozenset({
    "attention_probs_dropout_prob", "classifier_dropout", "directionality", "gradient_checkpointing", "layerdrop",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "sentence_transformers", "tie_word_embeddings",
})  # fmt: skip
"""Fields about training, and of a pooler that no file of these types describes otherwise."""


class Head(StrEnum):
    """The part of a checkpoint behind the layers."""

    NONE = "none"
    TEXT = "text"  # labels of a text, or of a pair of texts
    TOKENS = "tokens"  # labels of each token


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderConfig(ModelConfig):
    """`activation` is `gelu`, `gelu_tanh`, `relu` or `silu`. `num_types`: kinds of tokens that have an embedding of
    their own, 0 for none. `position_offset`: rows of the table of positions in front of that of the first token.
    `labels` are those of the `head`, which reads the first token of a text, or with `head_mean` the mean of all.
    `independent_labels`: each label has a probability of its own, instead of a share of 1. `dense` are layers behind
    the pooling of a text; a model with a head has none. `token_layers` are layers behind each token, of a model with
    neither (BGE-M3, arXiv 2402.03216, section 3.2)."""

    activation: str = "gelu"
    num_types: int = 0
    position_offset: int = 0
    head: Head = Head.NONE
    labels: tuple[str, ...] = ()
    head_mean: bool = False
    independent_labels: bool = False
    dense: tuple[Dense, ...] = ()
    token_layers: tuple[Dense, ...] = ()

    @property
    def is_text_encoder(self) -> bool:
        """Return True."""
        return True

    @property
    def head_outputs(self) -> int:
        """Return the number of labels, or the outputs of the last dense layer, or of all layers behind each token."""
        if self.token_layers:
            return sum(layer.outputs for layer in self.token_layers)
        return self.dense[-1].outputs if self.dense else len(self.labels)

    @property
    def vector_size(self) -> int:
        """Return how many numbers the vector of a text has."""
        return self.dense[-1].outputs if self.dense else self.hidden_size

    def with_files(self, path: Path) -> TextEncoderConfig:
        """Return it with the dense layers in the folder or the GGUF file, or those behind each token. Raises ModelError
        for one that takes no hidden state."""
        dense = dense_layers(path) if self.head is Head.NONE else ()
        of_tokens = token_layers(path) if self.head is Head.NONE and not dense else ()
        for layer in (*dense[:1], *of_tokens):
            if layer.inputs != self.hidden_size:
                raise ModelError(
                    f"{path}: {layer.folder} has {layer.inputs} inputs; hidden states have {self.hidden_size} numbers"
                )
        return replace(self, dense=dense, token_layers=of_tokens)

    @property
    def num_ids(self) -> int:
        """Return the number of ids of the step's tokens: a token of kind t has its id + t * vocab_size."""
        return self.vocab_size * max(1, self.num_types)


class HeadValues(TypedDict, total=False):
    """The values of a `TextEncoderConfig` about the head; none without a head."""

    head: Head
    labels: tuple[str, ...]
    independent_labels: bool


class EncoderValues(LayerValues, HeadValues):
    """The values of a `TextEncoderConfig`."""

    position_offset: int
    activation: str
    num_types: int


class RotaryValues(EncoderValues):
    """The values of a `TextEncoderConfig` whose positions rotate queries and keys."""

    rope_scaling: dict[str, Any] | None


def encoder_fields(fields: Fields, *, positions: int, offset: int = 0, types: int = 0) -> EncoderValues:
    """Return the values of a `TextEncoderConfig` from fields under BERT's names. The defaults `positions` and `types`
    are those of transformers 5.24 for the type; 0 types: the type has none, whatever the file says."""
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.only("position_embedding_type", "absolute")
    hidden_size, num_heads = fields.size("hidden_size", default=768), fields.size("num_attention_heads", default=12)
    num_layers = fields.size("num_hidden_layers", default=12, most=MAX_LAYERS)
    if hidden_size % num_heads:
        raise fields.wrong("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
    table = fields.size("max_position_embeddings", default=positions, least=offset + 1)
    own = common(fields.replaced(hidden_size=hidden_size, num_hidden_layers=num_layers))
    return {
        **own,
        "eos_token_ids": (),
        "intermediate_size": fields.size("intermediate_size", default=3072),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": table - offset,
        "position_offset": offset,
        "rms_norm_eps": fields.positive("layer_norm_eps", default=1e-12),
        "rope_theta": 0.0,
        "layer_types": (FULL,) * num_layers,
        "activation": activation(fields),
        "num_types": fields.size("type_vocab_size", default=types, least=0) if types else 0,
        **head_fields(fields),
    }


def rotary_fields(fields: Fields, *, positions: int, types: int, theta: float) -> RotaryValues:
    """As `encoder_fields`, of a type whose positions rotate queries and keys."""
    values = encoder_fields(fields, positions=positions, types=types)
    rope_theta, scaling = rope_theta_and_scaling(
        fields, default_theta=theta, max_positions=values["max_position_embeddings"]
    )
    head_dim = fields.size("head_dim", default=values["head_dim"])
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number: rotary embedding pairs its halves")
    return {**values, "rope_theta": rope_theta, "rope_scaling": scaling, "head_dim": head_dim}


def activation(fields: Fields, name: str = "hidden_act", default: str = "gelu") -> str:
    """Return the activation of feed-forward layers. Raises ModelError for one that is not served."""
    given = fields.get(name, default)
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise fields.wrong(name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def class_names(fields: Fields) -> list[str]:
    """Return the names of transformers' classes that the checkpoint was saved from."""
    listed = fields.get("architectures", [])
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def head_fields(fields: Fields) -> HeadValues:
    """Return the head that the checkpoint's class has, and its labels. Raises ModelError for labels that are none."""
    classes = class_names(fields)
    head = Head.NONE
    if any(name.endswith("ForSequenceClassification") for name in classes):
        head = Head.TEXT
    elif any(name.endswith("ForTokenClassification") for name in classes):
        head = Head.TOKENS
    if head is Head.NONE:
        return {}
    fields.only("problem_type", "regression", "single_label_classification", "multi_label_classification")
    independent = fields.get("problem_type") in ("regression", "multi_label_classification")
    return {"head": head, "labels": _labels(fields), "independent_labels": independent}


def _labels(fields: Fields) -> tuple[str, ...]:
    named = fields.get("id2label")
    count = fields.size("num_labels", default=2, most=MAX_LABELS)
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    names = {str(key): value for key, value in named.items()} if isinstance(named, Mapping) else {}
    found = [names.get(str(i)) for i in range(len(names))]
    if not 1 <= len(found) <= MAX_LABELS or not all(_is_label(label) for label in found):
        raise fields.wrong("id2label", f"names of labels by the numbers from 0 on, at most {MAX_LABELS}")
    return tuple(map(str, found))


def _is_label(label: object) -> bool:
    return isinstance(label, str) and len(label) <= _MAX_LABEL_CHARS


def no_pooler(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is of BERT's pooler in a checkpoint whose vectors do not pass through it."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    return name.startswith("pooler.") and config.head is not Head.TEXT


def names_below(prefix: str, *unused: str) -> TensorNames:
    """Return the names of tensors that files have with or without `prefix`; those that begin with one of `unused` are
    of parts for training."""
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    return TensorNames(renamed=((rf"^{prefix}\.", ""), *OLD_NORMS), unused=(*buffers, *unused))
