from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts
from forebay.families.parts.latent import latent_attention, latent_transformer
from forebay.families.parts.sparse_latent import (
    FULL_INDEXER,
    SPARSE_HARMLESS,
    SPARSE_NAMES,
    SparseLatentConfig,
    read_index,
    small,
    sparse_latent,
)


def parse(fields: Fields) -> SparseLatentConfig:
    """Read DeepSeek-V3.2's fields; transformers' defaults of all sizes, an indexer in each layer."""
    latent = latent_attention(fields, q_rank=1536, interleaved=True)
    experts = grouped_experts(fields, number=256, scale=2.5, inner=2048, groups=8, best_groups=4)
    defaults = Defaults(kv_heads=True)
    num_layers = latent_transformer(fields, defaults, latent)["num_layers"]
    index = read_index(fields, latent, num_heads=64, interleaved=False)
    return sparse_latent(fields, defaults, latent, experts, index, (FULL_INDEXER,) * num_layers)


FAMILY: Final = Family(parse=parse, small=small, harmless=SPARSE_HARMLESS, names=SPARSE_NAMES)
