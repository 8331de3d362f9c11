from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.families.base.fields import Fields, is_number
from forebay.families.base.mixers import HyperConnections, KimiDelta, Latent, PooledIndex
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, LINEAR, Defaults, layers_of
from forebay.families.parts.experts import DENSE, SPARSE, grouped_experts, mlp_layer_types, small_experts
from forebay.families.parts.kimi_delta import kimi_delta
from forebay.families.parts.latent import DRAFT_HEAD, HARMLESS, latent_attention, latent_transformer, small_latent
from forebay.families.parts.sparse_latent import (
    FULL_INDEXER,
    INDEXER_FIELDS,
    SparseLatentConfig,
    indexer_types,
    read_index,
)
from forebay.families.parts.streams import hyper_connections

# transformers' name of layers with attention, and that of published files.
INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention")

_LINEAR_NAMES: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
# What `layer_types` says as well, in published files.
_LISTS: Final = ("kda_layers", "full_attn_layers")
# About the layer that drafts, rotations of which there are none, and the router's numbers, which are float32 here.
_HARMLESS: Final = frozenset({
    "head_dim", "index_share_for_mtp_iteration", "indexer_rope_interleave", "mlp_bias", "moe_router_dtype",
})  # fmt: skip
_LOWER_BOUND: Final = -5.0
_NUM_DENSE: Final = 3
_MOST_POOL: Final = 1024
_ONLY: Final = {
    "qk_rope_head_dim": 0,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "mhc": True,
    "mla_use_nope": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledConfig(SparseLatentConfig):
    """A configuration of pools of tokens that indexers select, delta rules and residual streams. Gates and values of
    MLPs and experts are cut at `limit`."""

    index: PooledIndex
    delta: KimiDelta
    hyper: HyperConnections
    limit: float

    @property
    def sparse_top_k(self) -> int:
        return self.index.top_k + self.index.pool - 1


def parse(fields: Fields) -> PooledConfig:
    """Read GLM-5.3-Flash's fields, those of its delta rule under either name."""
    inner = fields.within("linear_attn_config")
    linear = fields.under(inner.renamed(_LINEAR_NAMES, nulls=True))
    safe = inner.flag("safe_gate", default=True) and fields.has("linear_attn_config")
    for name in _LISTS:
        inner.get(name)
    for name, value in _ONLY.items():
        fields.only(name, value)
    fields = fields.dropped(*ROPE_FIELDS)
    latent = _latent(fields)
    values = latent_transformer(fields, Defaults(kv_heads=True, rms_norm_eps=1e-5), latent)
    num_layers = values["num_layers"]
    if fields.get("mlp_layer_types") is None:
        fields.only("first_k_dense_replace", _NUM_DENSE)
    values["layer_types"] = layers = _layers(fields, num_layers)
    values["head_dim"] = 0
    index = _index(fields, latent)
    return PooledConfig(
        **values,
        page_multiple=index.pool,
        latent=latent,
        experts=grouped_experts(fields, number=288, scale=2.5, inner=2048),
        mlp_layer_types=mlp_layer_types(fields, num_layers, dense=_NUM_DENSE),
        index=index,
        indexer_types=_indexers(fields, layers),
        delta=kimi_delta(linear, heads=64, head_dim=128, lower_bound=_lower_bound(linear, safe=safe)),
        hyper=hyper_connections(fields),
        limit=fields.positive("swiglu_limit", default=10.0),
    )


def _latent(fields: Fields) -> Latent:
    """Read the sizes of latent attention: no part of a head is rotated."""
    rotated = fields.replaced(qk_rope_head_dim=None)
    return replace(latent_attention(rotated, q_rank=1536, interleaved=False, nope_dim=256, value_dim=256), rope_dim=0)


def _layers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the layers, those with attention by one name: the file may have any."""
    computed = [FULL if i % 4 == 3 else LINEAR for i in range(num_layers)]
    found = layers_of(fields, computed, (LINEAR, FULL, *INDEXED))
    return tuple(FULL if kind in INDEXED else kind for kind in found)


def _index(fields: Fields, latent: Latent) -> PooledIndex:
    index = read_index(fields, latent, num_heads=32, interleaved=False)
    pool = fields.size("index_kpool", default=16, least=2, most=_MOST_POOL)
    if index.top_k % pool:
        raise fields.wrong("index_topk", f"a multiple of index_kpool, {pool}")
    return PooledIndex(
        num_heads=index.num_heads, head_dim=index.head_dim, top_k=index.top_k, interleaved=False, pool=pool
    )


def _indexers(fields: Fields, layers: Sequence[str]) -> tuple[str, ...]:
    """Read which layers have an indexer. Raises ModelError for a layer that shares a selection with none just before
    it: no other selection is carried that far."""
    found = indexer_types(fields, len(layers))
    for i, kind in enumerate(layers):
        has_source = i > 0 and (layers[i - 1], found[i - 1]) == (FULL, FULL_INDEXER)
        if kind == FULL and found[i] != FULL_INDEXER and not has_source:
            raise fields.wrong("indexer_types", f"full in layer {i}, behind which layer {i - 1} has no indexer")
    return found


def _lower_bound(linear: Fields, *, safe: bool) -> float:
    """Return the bound of decays, 0 for none: a null is that only if gates are not `safe`."""
    null = linear.is_null("linear_lower_bound")
    value = linear.get("linear_lower_bound", _LOWER_BOUND)
    if not is_number(value) or not -1e3 < value < 0:
        raise linear.wrong("linear_lower_bound", "a number below 0")
    return 0.0 if null and not safe else float(value)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a delta rule, then one with attention, whose indexers
    select 4 pools of 16 tokens."""
    return {
        **small_latent(shape),
        **small_experts(shape),
        "qk_rope_head_dim": 0,
        "first_k_dense_replace": None,
        "mlp_layer_types": shape.cycle(DENSE, SPARSE),
        "layer_types": shape.cycle(*[LINEAR] * 3, FULL),
        "linear_num_heads": shape.num_heads,
        "linear_head_dim": shape.head_dim,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "index_kpool": 16,
        "hc_mult": 2,
        "tie_word_embeddings": False,
    }


def _unused(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is of the indexer of the layer that drafts, which attends to all tokens here."""
    return name.startswith(f"model.layers.{config.num_layers}.self_attn.indexer.")


# Layers have their published names here; transformers' modules differ from them.
_MODULES: Final = ((r"\.forget_gate\.", "."),)

FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=HARMLESS | INDEXER_FIELDS | _HARMLESS,
    names=TensorNames(stacked_experts=True, draft_layers=True, draft_head=DRAFT_HEAD, modules=_MODULES),
    unused=_unused,
)
