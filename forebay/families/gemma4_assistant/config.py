from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.values import values_of
from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.parts import gemma4


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantConfig(gemma4.Gemma4Config):
    """`backbone_size` is the hidden size of the model that it drafts for. With `num_centroids`, 0 for none, a token is
    chosen of those next to the best `best_centroids`."""

    backbone_size: int
    num_centroids: int
    best_centroids: int


def parse(fields: Fields) -> AssistantConfig:
    """No layer has keys and values of its own, inputs of its own or experts."""
    plain = fields.dropped("num_kv_shared_layers")
    text = gemma4.parse(plain)
    for name, given in (
        ("hidden_size_per_layer_input", text.per_layer_size),
        ("enable_moe_block", text.experts),
        ("use_double_wide_mlp", text.wide_readers),
    ):
        if given:
            raise fields.wrong(name, "0 or false: layers of an assistant are plain ones")
    num_centroids = best = 0
    if fields.flag("use_ordered_embeddings", default=False):
        num_centroids = fields.size("num_centroids", default=2048)
        best = fields.size("centroid_intermediate_top_k", default=32, most=num_centroids)
        if text.vocab_size % num_centroids:
            raise fields.wrong("num_centroids", f"a divisor of vocab_size, {text.vocab_size}")
    else:
        fields.dropped("num_centroids", "centroid_intermediate_top_k")
    return AssistantConfig(
        **values_of(text),
        backbone_size=fields.size("backbone_hidden_size", default=1536),
        num_centroids=num_centroids,
        best_centroids=best,
    )


_NAMES: Final = TensorNames(whole=("masked_embedding.token_ordering",))

FAMILY: Final = Family(parse=parse, harmless=gemma4.HARMLESS, names=_NAMES)
