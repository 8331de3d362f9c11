from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from forebay.families.base.fields import MAX_SIZE, Fields, is_number
from forebay.families.base.rope import ropes_by_kind
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, TransformerValues, Windows, transformer
from forebay.families.parts.caps import cap
from forebay.families.parts.ropes import Ropes
from forebay.families.parts.shared_kv import is_of_shared_kv, kv_owners

# What transformers assumes where a file is silent, but for hidden size, MLP and layers.
_SIZES: Final = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
_SPARSE_LAYERS: Final = 10
_SPARSITY: Final = 0.95
_SPARSITIES: Final = "activation_sparsity_pattern"
_MAX_STREAMS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3nConfig(ModelConfig):
    """`intermediate_sizes` and `deviations` are by layer: an MLP's size, and how many standard deviations above their
    mean gates must be to count, None for all. `kv_owners`: for each layer the one that keeps the KV it reads, mostly
    itself. `per_layer_size`: entries of a layer's own input of each token. `streams` of which layers compute with
    `active_stream`; `scaled`: what that one gives to the others has a weight for each entry. `laurel_rank`: of the
    low-rank residual. `logits_cap` 0 for none."""

    ropes: Ropes
    intermediate_sizes: tuple[int, ...]
    deviations: tuple[float | None, ...]
    kv_owners: tuple[int, ...]
    per_layer_size: int
    per_layer_vocab_size: int
    streams: int
    active_stream: int
    scaled: bool
    laurel_rank: int
    logits_cap: float


def parse(fields: Fields) -> Gemma3nConfig:
    """Read Gemma 3n's fields: four layers of five have a window by default, and both kinds have a rope of their own."""
    fields = fields.replaced(**{name: size for name, size in _SIZES.items() if fields.get(name) is None})
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    sizes = fields.get("intermediate_size")
    values = _attention(fields, sizes)
    count, kinds = values["num_layers"], values["layer_types"]
    thetas = {FULL: fields.get("rope_theta") or 1e6, SLIDING: fields.get("rope_local_base_freq") or 1e4}
    ropes = ropes_by_kind(fields, thetas, scaled=FULL, max_positions=values["max_position_embeddings"])
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    streams = fields.size("altup_num_inputs", default=4, least=2, most=_MAX_STREAMS)
    return Gemma3nConfig(
        **values,
        ropes=ropes,
        intermediate_sizes=tuple(sizes) if isinstance(sizes, list) else (values["intermediate_size"],) * count,
        deviations=_deviations(fields, count),
        kv_owners=kv_owners(fields, kinds, default=15),
        per_layer_size=fields.size("hidden_size_per_layer_input", default=256),
        per_layer_vocab_size=fields.size("vocab_size_per_layer_input", default=262_144),
        streams=streams,
        active_stream=fields.size("altup_active_idx", default=0, most=streams - 1),
        scaled=fields.flag("altup_correct_scale", default=True),
        laurel_rank=fields.size("laurel_rank", default=64),
        logits_cap=cap(fields, "final_logit_softcapping", default=30.0),
    )


def _attention(fields: Fields, sizes: Any) -> TransformerValues:
    """Return the values that all transformers have; of several sizes of MLPs the largest."""
    if isinstance(sizes, list):
        count = fields.size("num_hidden_layers")
        if len(sizes) != count or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
            raise fields.wrong("intermediate_size", f"a size, or {count} of them")
        fields = fields.replaced(intermediate_size=max(sizes))

    def windowed(num_layers: int) -> list[int]:
        return [i for i in range(num_layers) if (i + 1) % 5]

    plain = fields.without("rope_parameters", "rope_scaling", "rope_theta")
    windows = Windows(size=512, layers=windowed, required=True)
    return transformer(plain, Defaults(head_dim=256, tied=True), windows=windows)


def _deviations(fields: Fields, count: int) -> tuple[float | None, ...]:
    """Return the cut of each layer's gates: so many standard deviations that a share of a normal distribution is
    below."""
    sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    given = fields.get(_SPARSITIES, [_SPARSITY] * sparse + [0.0] * (count - sparse))
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(is_number(share) and 0 <= share < 1 for share in given)
    ):
        raise fields.wrong(_SPARSITIES, f"a list of {count} shares, each at least 0 and below 1")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in given)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: a third of the layers read the KV of others, if there are three or
    more, and half of the MLPs are sparse."""
    return {
        "layer_types": [*shape.cycle(SLIDING, FULL)],
        "sliding_window": WINDOW,
        "num_kv_shared_layers": max(0, min(shape.num_layers // 3, shape.num_layers - 2)),
        "hidden_size_per_layer_input": shape.head_dim,
        "vocab_size_per_layer_input": shape.vocab_size,
        "laurel_rank": shape.head_dim,
        _SPARSITIES: [_SPARSITY if layer % 2 == 0 else 0.0 for layer in range(shape.num_layers)],
    }


def _unused(config: ModelConfig, name: str) -> bool:
    assert isinstance(config, Gemma3nConfig), type(config)
    return is_of_shared_kv(config, name)


FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"hidden_act", "altup_coef_clip"}), unused=_unused)
