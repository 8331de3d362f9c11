"""The configuration of Gemma 4's texts, which its assistant has as well."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from forebay.families.base.fields import Fields
from forebay.families.base.rope import ropes_by_kind
from forebay.families.config.model_config import Experts, ModelConfig
from forebay.families.config.transformer import (
    FULL,
    SLIDING,
    Defaults,
    TransformerValues,
    Windows,
    count_of,
    experts,
    transformer,
)
from forebay.families.parts.caps import cap
from forebay.families.parts.ropes import Ropes
from forebay.families.parts.shared_kv import kv_owners

# What transformers assumes where a file is silent. Its defaults of hidden size, MLP and layers describe no published
# model, so a file without these is refused.
_SIZES: Final = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_GLOBAL_HEAD_DIM: Final = 512
_PER_LAYER_SIZE: Final = 256
_PER_LAYER_VOCAB: Final = 262_144
_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
HARMLESS: Final = frozenset({"hidden_act"})
_LAYER: Final = re.compile(r"\d{1,6}")


class Heads(NamedTuple):
    """The number of KV heads, and the size of a head, of one kind of attention."""

    num_kv_heads: int
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4Config(ModelConfig):
    """`heads` and `ropes` are by kind of attention. `kv_owners`: for each layer the one that keeps the KV it reads,
    mostly itself. `values_from_keys`: in layers without a window values are projected as keys are. `per_layer_size`:
    entries of a layer's own input of each token, 0 for none. `wide_readers`: MLPs of layers that read another's KV are
    of twice the size. `logits_cap` 0 for none. `bidirectional`: in layers with a window, attention within pictures is
    in both directions."""

    heads: Mapping[str, Heads]
    ropes: Ropes
    kv_owners: tuple[int, ...]
    values_from_keys: bool
    per_layer_size: int
    per_layer_vocab_size: int
    wide_readers: bool
    logits_cap: float
    bidirectional: bool


def parse(fields: Fields) -> Gemma4Config:
    """Read Gemma 4's fields: heads and ropes differ between layers with a window and without, and the last layers may
    read the KV of earlier ones."""
    fields = fields.replaced(**{name: size for name, size in _SIZES.items() if fields.get(name) is None})
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", "vision")
    if fields.has("rope_theta") or fields.has("rope_scaling"):
        raise fields.wrong("rope_theta", "absent, and rope_scaling too: there is one for each kind of attention")
    values = _attention(fields)
    kinds, per_layer = values["layer_types"], count_of(fields, "hidden_size_per_layer_input", default=_PER_LAYER_SIZE)
    positions = values["max_position_embeddings"]
    described = fields.replaced(rope_parameters=fields.get("rope_parameters") or _ROPES)
    ropes = ropes_by_kind(described, {FULL: 1e6, SLIDING: 1e4}, scaled=FULL, max_positions=positions)
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    values_from_keys = fields.flag("attention_k_eq_v", default=False)
    return Gemma4Config(
        **values,
        heads=_heads(fields, values, values_from_keys),
        ropes=ropes,
        kv_owners=kv_owners(fields, kinds, default=0),
        values_from_keys=values_from_keys,
        per_layer_size=per_layer,
        per_layer_vocab_size=_per_layer_vocab(fields, values["vocab_size"], per_layer),
        wide_readers=fields.flag("use_double_wide_mlp", default=False),
        logits_cap=cap(fields, "final_logit_softcapping", default=0.0),
        bidirectional=fields.get("use_bidirectional_attention") is not None,
        experts=_experts(fields),
    )


def _attention(fields: Fields) -> TransformerValues:
    """Return the values that all transformers have. The last layer sees everything, whatever the file says."""
    given = fields.get("layer_types")
    if isinstance(given, list):
        fields = fields.replaced(layer_types=[*given[:-1], FULL])

    def windowed(num_layers: int) -> list[int]:
        return [i for i in range(num_layers - 1) if (i + 1) % 6]

    plain = fields.without("rope_parameters", "rope_scaling", "rope_theta")
    windows = Windows(size=512, layers=windowed, required=True)
    return transformer(plain, Defaults(head_dim=256, tied=True), windows=windows)


def _heads(fields: Fields, values: TransformerValues, values_from_keys: bool) -> dict[str, Heads]:
    """Return the heads of each kind of attention: as saved by transformers, layer by layer, or as published."""
    plain = Heads(values["num_kv_heads"], values["head_dim"])
    if fields.has("per_layer_config"):
        fields = fields.dropped("global_head_dim", "num_global_key_value_heads")
        heads = _heads_by_kind(fields, plain, values["layer_types"])
    else:
        num_kv_heads = plain.num_kv_heads
        if values_from_keys:
            num_kv_heads = fields.size("num_global_key_value_heads", default=num_kv_heads)
        fields.dropped("num_global_key_value_heads")
        full = Heads(num_kv_heads, fields.size("global_head_dim", default=_GLOBAL_HEAD_DIM))
        heads = {SLIDING: plain, FULL: full}
    for kind, (count, dim) in heads.items():
        if dim % 2 or values["num_heads"] % count:
            raise fields.wrong(
                "per_layer_config" if fields.has("per_layer_config") else "global_head_dim",
                f"such that heads of {kind} ({count} of KV, {dim} dimensions) have an even size and divide the "
                f"{values['num_heads']} of queries",
            )
    return heads


def _heads_of_layer(fields: Fields, given: Any, layer: int, plain: Heads) -> Heads:
    """Read the entry of one layer. What it does not have is as in `plain`."""
    if not isinstance(given, dict) or not given.keys() <= {"head_dim", "num_key_value_heads"}:
        raise fields.wrong("per_layer_config", "head_dim and num_key_value_heads of some layers")
    of_layer = Fields(given, f"{fields.where}: per_layer_config of layer {layer}")
    num_kv_heads = of_layer.size("num_key_value_heads", default=plain.num_kv_heads)
    return Heads(num_kv_heads, of_layer.size("head_dim", default=plain.dim))


def _heads_by_kind(fields: Fields, plain: Heads, kinds: Sequence[str]) -> dict[str, Heads]:
    """Read an object that says what some layers have instead of what all have, by their numbers, which may begin with
    zeros."""
    by_layer = fields.get("per_layer_config", {})
    if not isinstance(by_layer, dict) or not all(_LAYER.fullmatch(number) for number in by_layer):
        raise fields.wrong("per_layer_config", "an object with numbers of layers")
    own = {int(number): given for number, given in by_layer.items()}
    found: dict[str, set[Heads]] = {SLIDING: set(), FULL: set()}
    for layer, kind in enumerate(kinds):
        found[kind].add(_heads_of_layer(fields, own.pop(layer, {}), layer, plain))
    if own or any(len(shapes) > 1 for shapes in found.values()):
        raise fields.wrong("per_layer_config", "of this model's layers, and the same for all of a kind")
    return {kind: shapes.pop() if shapes else plain for kind, shapes in found.items()}


def _per_layer_vocab(fields: Fields, vocab_size: int, per_layer: int) -> int:
    if not per_layer:
        fields.dropped("vocab_size_per_layer_input")
        return 0
    return fields.size("vocab_size_per_layer_input", default=_PER_LAYER_VOCAB, least=vocab_size)


def _experts(fields: Fields) -> Experts | None:
    """Read the experts of every layer, beside its MLP."""
    if fields.flag("enable_moe_block", default=False):
        return experts(fields.renamed({"top_k_experts": "num_experts_per_tok"}))
    fields.dropped("num_experts", "top_k_experts", "moe_intermediate_size")
    return None
