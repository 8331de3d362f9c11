from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields, is_number
from forebay.families.base.mixers import HyperConnections, Index
from forebay.families.base.rope import rope_parameters, rope_theta_and_scaling
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.config.transformer import SLIDING, Defaults, transformer
from forebay.families.parts.streams import hyper_connections
from forebay.formats.layer_packing import LayerPacking
from forebay.formats.mixed_floats import EXPERTS, mixed_floats

SPARSE: Final = "compressed_sparse_attention"
HEAVY: Final = "heavily_compressed_attention"
LAYER_TYPES: Final = (SLIDING, SPARSE, HEAVY)
HASHED: Final = "hash_moe"
ROUTED: Final = "moe"

_RATES: Final = {SPARSE: 4, HEAVY: 128}
_OF_RATIO: Final = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_NUM_HASHED: Final = 3
_ONLY: Final = {
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "mlp_bias": False,
}

Rope = tuple[float, dict[str, Any] | None]
"""Base and scaling."""

_MOST_RATE: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedExperts(Experts):
    """`scale` is of the experts' weights; gate and up are cut at `limit`."""

    scale: float
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedConfig(ModelConfig):
    """`layer_types` are those of `LAYER_TYPES`, `rates` the tokens of an entry by layer type, and `mlp_layer_types`
    `hash_moe` or `moe`. The last `rope_dim` entries of a head are rotated: with `rope_theta` in layers without entries,
    with `compress_rope`, base and scaling, in the others. Outputs of heads are projected in `output_groups`, each to
    `output_rank` entries."""

    q_rank: int
    rope_dim: int
    compress_rope: Rope
    rates: Mapping[str, int]
    index: Index
    output_groups: int
    output_rank: int
    hyper: HyperConnections
    experts: HashedExperts
    mlp_layer_types: tuple[str, ...]

    @property
    def draft_size(self) -> int:
        return self.hyper.num_streams * self.hidden_size


def parse(fields: Fields) -> CompressedConfig:
    """Read DeepSeek-V4's fields, as transformers saves them or as they were published."""
    for name, value in _ONLY.items():
        fields.only(name, value)
    num_layers, rates = fields.size("num_hidden_layers", most=MAX_LAYERS), _rates(fields)
    inner = fields.size("moe_intermediate_size", default=fields.size("intermediate_size", default=2048))
    fields.only("intermediate_size", inner)  # to transformers another name of the same
    given = {"partial_rotary_factor": None, "rope_scaling": None, "rope_parameters": None}
    plain = fields.replaced(num_key_value_heads=1, intermediate_size=inner, **given)
    values = transformer(plain, Defaults(head_dim=512), layer_types=_layer_types(fields, num_layers))
    rope_dim = _rope_dim(fields, values["head_dim"])
    (theta, scaling), compress_rope = _ropes(fields, values["max_position_embeddings"])
    values |= {"rope_theta": theta, "rope_scaling": scaling}
    values["sliding_window"] = fields.size("sliding_window", default=128)
    return CompressedConfig(
        **values,
        page_multiple=math.lcm(*rates.values()),
        q_rank=fields.size("q_lora_rank", default=1024),
        rope_dim=rope_dim,
        compress_rope=compress_rope,
        rates=rates,
        index=_index(fields, rope_dim),
        output_groups=_groups(fields, values["num_heads"]),
        output_rank=fields.size("o_lora_rank", default=1024),
        hyper=hyper_connections(fields),
        experts=_experts(fields, inner),
        mlp_layer_types=_mlp_layer_types(fields, num_layers),
        packing=_packing(fields),
    )


def _packing(fields: Fields) -> LayerPacking | None:
    """Return how published files have their layers; None for a file that all families are read from alike."""
    given = fields.raw.get("quantization_config")
    stored = given.get("expert_dtype") if isinstance(given, dict) else None  # as transformers saves it
    experts = fields.get("expert_dtype", "fp4" if stored is None else stored)
    if not isinstance(experts, str) or experts not in EXPERTS:
        raise fields.wrong("expert_dtype", " or ".join(EXPERTS))
    found = mixed_floats(given, experts)
    if found is not None:
        fields.get("quantization_config")
    return found


def _index(fields: Fields, rope_dim: int) -> Index:
    return Index(
        num_heads=fields.size("index_n_heads", default=64),
        head_dim=fields.size("index_head_dim", default=128, least=rope_dim),
        top_k=fields.size("index_topk", default=512),
        interleaved=True,
    )


def _rates(fields: Fields) -> dict[str, int]:
    """Return the tokens of an entry by layer type. At least 2: position 0, the position of padding, ends no block."""
    given = fields.within("compress_rates")
    by_kind = {kind: given.size(kind, default=rate, least=2, most=_MOST_RATE) for kind, rate in _RATES.items()}
    old = {"compress_rate_csa": SPARSE, "compress_rate_hca": HEAVY}
    return {kind: fields.size(name, default=by_kind[kind], least=2, most=_MOST_RATE) for name, kind in old.items()}


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the layer types: as listed, by the published ratios, or two heavily compressed layers and then both kinds
    in turn."""
    numbers = fields.ints("compress_ratios", default=[])[:num_layers]
    if fields.get("layer_types") is not None:
        return fields.one_of_each("layer_types", num_layers, LAYER_TYPES)
    if numbers:
        if len(numbers) < num_layers or not set(numbers) <= _OF_RATIO.keys():
            raise fields.wrong("compress_ratios", f"a list of {num_layers}, each 0, 4 or 128")
        return [_OF_RATIO[number] for number in numbers]
    return [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(num_layers)]


def _mlp_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    hashed = fields.size("num_hash_layers", default=_NUM_HASHED, least=0)
    if fields.get("mlp_layer_types") is not None:
        return tuple(fields.one_of_each("mlp_layer_types", num_layers, (HASHED, ROUTED)))
    return tuple(HASHED if i < hashed else ROUTED for i in range(num_layers))


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """Return the rotated entries of a head: `qk_rope_head_dim`, or a share of the head."""
    given = rope_parameters(fields)
    shares = [fields.get("partial_rotary_factor"), given.get("partial_rotary_factor")]
    shares += [rope.get("partial_rotary_factor", 1.0) for rope in _nested(given)]
    dims = {_share_of(fields, share, head_dim) for share in shares if share is not None}
    if fields.get("qk_rope_head_dim") is not None or not dims:
        dims.add(fields.size("qk_rope_head_dim", default=64))
    if len(dims) > 1 or not all(2 <= dim <= head_dim and dim % 2 == 0 for dim in dims):
        raise fields.wrong("qk_rope_head_dim", f"one even number of a head's {head_dim} dimensions in all layers")
    return dims.pop()


def _nested(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the ropes of layers without entries and with, where each is described by itself."""
    both = tuple(rope for rope in (given.get("main"), given.get("compress")) if isinstance(rope, dict))
    return both if len(both) == 2 else ()


def _share_of(fields: Fields, share: Any, head_dim: int) -> int:
    if not is_number(share) or not 0 < share <= 1:
        raise fields.wrong("partial_rotary_factor", "a share of at most 1")
    return int(head_dim * share)


def _ropes(fields: Fields, max_positions: int) -> tuple[Rope, Rope]:
    """Return base and scaling of layers without entries, and of the others. One object describes the rope of the
    latter."""
    given, theta = rope_parameters(fields), fields.number("rope_theta", default=10_000.0)
    compress = fields.number("compress_rope_theta", default=160_000.0)
    described = _nested(given)
    if any("rope_theta" not in rope for rope in described):
        raise fields.wrong("rope_parameters", "with a rope_theta in each of main and compress")
    if not described:
        flat = {key: value for key, value in given.items() if key not in ("main", "compress", "rope_theta")}
        if flat.get("rope_type", flat.get("type")) == "yarn":
            flat.setdefault("attention_factor", 1.0)
        described = {}, {**flat, "rope_theta": compress}
    main, other = (
        rope_theta_and_scaling(
            Fields({"rope_parameters": _without_share(rope)}, f"{fields.where}: {kind}"),
            default_theta=default,
            max_positions=max_positions,
        )
        for kind, rope, default in zip(("main", "compress"), described, (theta, compress), strict=True)
    )
    return main, other


def _without_share(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


def _groups(fields: Fields, num_heads: int) -> int:
    groups = fields.size("o_groups", default=8)
    if num_heads % groups:
        raise fields.wrong("o_groups", f"a divisor of num_attention_heads, {num_heads}")
    return groups


def _experts(fields: Fields, inner: int) -> HashedExperts:
    number = fields.size("n_routed_experts", default=256)
    return HashedExperts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=6, most=number),
        intermediate_size=inner,
        scale=fields.number("routed_scaling_factor", default=1.5),
        limit=fields.positive("swiglu_limit", default=10.0),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: all types of layers, entries of 4 and 16 tokens, of which indexers select
    32."""
    return {
        "num_key_value_heads": 1,
        "layer_types": shape.cycle(*LAYER_TYPES),
        "compress_rates": {SPARSE: 4, HEAVY: 16},
        "num_hash_layers": 1,
        "sliding_window": 32,
        "q_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": 16,
        "o_groups": 2 - shape.num_heads % 2,
        "o_lora_rank": shape.head_dim,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 32,
        "hc_mult": 2,
        "intermediate_size": shape.hidden_size,
        "moe_intermediate_size": shape.hidden_size,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }


# Layers have their published names here, which transformers writes, too, but for the norm of keys; it and others have
# `model.` in front of them.
_RENAMED: Final = (
    (r"^layers\.", "model.layers."),
    (r"^(?:model\.)?embed\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"(\.attn)\.kv_norm\.", r"\1.norm."),
)
_MODULES: Final = (
    (r"\.self_attn\.compressor\.indexer\.q_b_proj$", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"(\.attn\..*)\.gate_proj$", r"\1.wgate"),
    (r"(\.attn\..*|\.attn)\.(kv|q_a|q_b|o_b)_proj$", r"\1.w\2"),
    (r"\.mlp\.shared_experts\.gate_proj$", ".ffn.shared_experts.w1"),
    (r"\.mlp\.shared_experts\.down_proj$", ".ffn.shared_experts.w2"),
    (r"\.mlp\.shared_experts\.up_proj$", ".ffn.shared_experts.w3"),
)
_HARMLESS: Final = frozenset({"auto_map", "rope_interleave"})
_DRAFT_HEAD: Final = (("mtp.0.norm.", "model.layers.{0}.shared_head.norm."), ("mtp.0.", "model.layers.{0}."))
_NAMES: Final = TensorNames(
    renamed=_RENAMED, unused=("mtp.",), draft_head=_DRAFT_HEAD, whole=("tid2eid",), modules=_MODULES
)


def _unused(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is the embedding or the head that some files repeat for the layer that drafts."""
    layer = f"model.layers.{config.num_layers}."
    return name in (f"{layer}emb.tok_emb.weight", f"{layer}head.weight")


FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS, names=_NAMES, unused=_unused)
