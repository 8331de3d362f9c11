from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from forebay.families.fields import Fields
from forebay.families.gemma2.config import cap
from forebay.families.gemma3_text.config import Ropes
from forebay.families.model_config import Experts, Family, ModelConfig
from forebay.families.rope import ropes_by_kind
from forebay.families.shape import WINDOW, Shape
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import FULL, SLIDING, Defaults, Windows, count_of, experts, transformer

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
_LAYER: Final = re.compile(r"\d{1,6}")
_SHARED_KV: Final = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.[kv]_(proj|norm)\.")


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
    theta, scaling = ropes[FULL]
    values_from_keys = fields.flag("attention_k_eq_v", default=False)
    return Gemma4Config(
        **{**values, "rope_theta": theta, "rope_scaling": scaling},
        heads=_heads(fields, values, values_from_keys),
        ropes=ropes,
        kv_owners=_kv_owners(fields, kinds),
        values_from_keys=values_from_keys,
        per_layer_size=per_layer,
        per_layer_vocab_size=_per_layer_vocab(fields, values["vocab_size"]) if per_layer else 0,
        wide_readers=fields.flag("use_double_wide_mlp", default=False),
        logits_cap=cap(fields, "final_logit_softcapping", default=0.0),
        bidirectional=fields.get("use_bidirectional_attention") is not None,
        experts=_experts(fields),
    )


def _attention(fields: Fields) -> dict[str, Any]:
    """Return the values that all transformers have. The last layer sees everything, whatever the file says."""
    given = fields.get("layer_types")
    if isinstance(given, list):
        fields = fields.replaced(layer_types=[*given[:-1], FULL])

    def windowed(num_layers: int) -> list[int]:
        return [i for i in range(num_layers - 1) if (i + 1) % 6]

    plain = fields.without("rope_parameters", "rope_scaling", "rope_theta")
    windows = Windows(size=512, layers=windowed, required=True)
    return transformer(plain, Defaults(head_dim=256, tied=True), windows=windows)


def _heads(fields: Fields, values: Mapping[str, Any], values_from_keys: bool) -> dict[str, Heads]:
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


def _heads_by_kind(fields: Fields, plain: Heads, kinds: Sequence[str]) -> dict[str, Heads]:
    """Read an object that says what some layers have instead of what all have, by their numbers, which may begin with
    zeros."""
    by_layer = fields.get("per_layer_config", {})
    if not isinstance(by_layer, dict) or not all(_LAYER.fullmatch(number) for number in by_layer):
        raise fields.wrong("per_layer_config", "an object with numbers of layers")
    own = {int(number): given for number, given in by_layer.items()}
    found: dict[str, set[Heads]] = {SLIDING: set(), FULL: set()}
    for layer, kind in enumerate(kinds):
        given = own.pop(layer, {})
        if not isinstance(given, dict) or not given.keys() <= {"head_dim", "num_key_value_heads"}:
            raise fields.wrong("per_layer_config", "head_dim and num_key_value_heads of some layers")
        of_layer = Fields(given, f"{fields.where}: per_layer_config of layer {layer}")
        num_kv_heads = of_layer.size("num_key_value_heads", default=plain.num_kv_heads)
        found[kind].add(Heads(num_kv_heads, of_layer.size("head_dim", default=plain.dim)))
    if own or any(len(shapes) > 1 for shapes in found.values()):
        raise fields.wrong("per_layer_config", "of this model's layers, and the same for all of a kind")
    return {kind: shapes.pop() if shapes else plain for kind, shapes in found.items()}


def _kv_owners(fields: Fields, kinds: Sequence[str]) -> tuple[int, ...]:
    """The layers from some number on keep nothing: each reads what the last of its kind before these keeps."""
    first = len(kinds) - count_of(fields, "num_kv_shared_layers", default=0)
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not set(kinds) <= last.keys():
        raise fields.wrong("num_kv_shared_layers", "less: before these there must be a layer of each kind")
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _per_layer_vocab(fields: Fields, vocab_size: int) -> int:
    return fields.size("vocab_size_per_layer_input", default=_PER_LAYER_VOCAB, least=vocab_size)


def _experts(fields: Fields) -> Experts | None:
    """Read the experts of every layer, beside its MLP."""
    if fields.flag("enable_moe_block", default=False):
        return experts(fields.renamed({"top_k_experts": "num_experts_per_tok"}))
    fields.dropped("num_experts", "top_k_experts", "moe_intermediate_size")
    return None


def small(shape: Shape) -> dict[str, Any]:
    """Let a third of the layers read the KV of others, if there are three or more."""
    return {
        "layer_types": [*shape.cycle(SLIDING, FULL)[:-1], FULL],
        "sliding_window": WINDOW,
        "num_kv_shared_layers": shape.num_layers // 3,
        "global_head_dim": 2 * shape.head_dim,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": shape.head_dim,
        "vocab_size_per_layer_input": shape.vocab_size,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": shape.hidden_size,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }


def _is_of_shared_kv(config: ModelConfig, name: str) -> bool:
    """Published files have keys and values of layers, too, that read those of others."""
    assert isinstance(config, Gemma4Config), type(config)
    found = _SHARED_KV.match(name)
    layer = -1 if found is None else int(found[1])
    return 0 <= layer < config.num_layers and config.kv_owners[layer] != layer


_NAMES: Final = TensorNames(stacked_experts=True, stacks=("experts.gate_up_proj", "experts.down_proj"))

FAMILY: Final = Family(
    parse=parse, small=small, harmless=frozenset({"hidden_act"}), names=_NAMES, unused=_is_of_shared_kv
)
