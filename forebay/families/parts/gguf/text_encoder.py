"""Names and keys of text encoders."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Header
from forebay.formats.strings import Strings

KEYS: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}
LABELS: Final = "classifier.output_labels"
EMBEDDINGS: Final = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
TOP_NAMES: Final = {
    **EMBEDDINGS,
    "position_embd": "embeddings.position_embeddings",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
HEAD: Final = "cls.output.weight"
_NOT_SAID: Final = ("attention_bias", "head_dim", "mlp_bias", "tie_word_embeddings")


def configure(header: Header) -> None:
    """Complete the configuration: kinds of tokens, as many as the file has, and the labels of a classifier."""
    config, tensors = header.config, header.file.tensors
    for name in _NOT_SAID:
        config.pop(name, None)
    types = tensors.get("token_types.weight")
    config["type_vocab_size"] = 0 if types is None else types.shape[0]
    if HEAD in tensors:
        config["architectures"] = ["ForSequenceClassification"]
        config["id2label"] = {str(number): label for number, label in enumerate(_labels(header))}


def no_head(header: Header) -> None:
    """Raise ModelError for a classifier, whose first layer the converter leaves out."""
    if any(name.startswith("cls.") for name in header.file.tensors):
        raise header.wrong("a classifier without its pooler, which the converter leaves out: take its safetensors")


def _labels(header: Header) -> list[str]:
    """Return the names of the labels. Raises ModelError for other than a name for each output."""
    outputs, named = header.file.tensors[HEAD].shape[0], header.own.get(LABELS)
    if named is None:
        return [f"LABEL_{number}" for number in range(outputs)]
    if not isinstance(named, Strings) or len(named) != outputs:
        raise header.wrong(f"{LABELS} is not a text for each of the {outputs} outputs of its classifier")
    return list(named)
