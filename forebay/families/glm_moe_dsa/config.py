from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts
from forebay.families.parts.latent import latent_attention, latent_transformer
from forebay.families.parts.sparse_latent import (
    INDEXER_FIELDS,
    SPARSE_HARMLESS,
    SPARSE_NAMES,
    SparseLatentConfig,
    indexer_types,
    read_index,
    sparse_latent,
)
from forebay.families.parts.sparse_latent import small as small_v32


def parse(fields: Fields) -> SparseLatentConfig:
    """Read GLM-5's fields; transformers' defaults of all sizes, and its rule of which layers have an indexer."""
    latent = latent_attention(fields, q_rank=2048, interleaved=True, nope_dim=192, value_dim=256)
    experts = grouped_experts(fields, number=256, scale=2.5, inner=2048, groups=1, best_groups=1)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5)
    num_layers = latent_transformer(fields, defaults, latent)["num_layers"]
    index = read_index(fields, latent, num_heads=32, interleaved=True)
    return sparse_latent(fields, defaults, latent, experts, index, indexer_types(fields, num_layers))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, in which every second layer shares a selection."""
    return {**small_v32(shape), "index_topk_freq": 2, "index_skip_topk_offset": 1}


FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=SPARSE_HARMLESS | INDEXER_FIELDS,
    names=SPARSE_NAMES,
)
