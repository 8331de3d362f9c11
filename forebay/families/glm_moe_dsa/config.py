from __future__ import annotations

from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family
from forebay.families.parts.experts import grouped_experts
from forebay.families.parts.latent import latent_attention, latent_transformer
from forebay.families.parts.sparse_latent import (
    FULL_INDEXER,
    SHARED_INDEXER,
    SPARSE_HARMLESS,
    SPARSE_NAMES,
    SparseLatentConfig,
    read_index,
    sparse_latent,
)
from forebay.families.parts.sparse_latent import small as small_v32
from forebay.families.shape import Shape
from forebay.families.transformer import Defaults

_LETTERS: Final = {"F": FULL_INDEXER, "S": SHARED_INDEXER}


def parse(fields: Fields) -> SparseLatentConfig:
    """Read GLM-5's fields; transformers' defaults of all sizes, and its rule of which layers have an indexer."""
    latent = latent_attention(fields, q_rank=2048, interleaved=True, nope_dim=192, value_dim=256)
    experts = grouped_experts(fields, number=256, scale=2.5, inner=2048, groups=1, best_groups=1)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5)
    num_layers = latent_transformer(fields, defaults, latent)["num_layers"]
    index = read_index(fields, latent, num_heads=32, interleaved=True)
    return sparse_latent(fields, defaults, latent, experts, index, indexer_types(fields, num_layers))


def indexer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Read which layers have an indexer: from a list, a pattern of letters, or every `index_topk_freq`-th layer from
    `index_skip_topk_offset` on. Raises ModelError if the first has none."""
    name = next((name for name in ("indexer_types", "index_topk_pattern") if fields.get(name) is not None), None)
    if name is None:
        frequency, offset = (
            fields.size(name, default=default, least=0)
            for name, default in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
        )
        full = (max(i - offset + 1, 0) % max(frequency, 1) == 0 for i in range(num_layers))
        found = [FULL_INDEXER if each else SHARED_INDEXER for each in full]
    else:
        pattern = fields.get(name)
        if isinstance(pattern, str):
            fields = fields.replaced(**{name: [_LETTERS.get(letter, letter) for letter in pattern]})
        found = fields.one_of_each(name, num_layers, (FULL_INDEXER, SHARED_INDEXER))
    if found[0] != FULL_INDEXER:
        raise fields.wrong(name or "index_topk_freq", "an indexer in the first layer, whose selection others can share")
    return tuple(found)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, in which every second layer shares a selection."""
    return {**small_v32(shape), "index_topk_freq": 2, "index_skip_topk_offset": 1}


FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=SPARSE_HARMLESS | {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "indexer_types"},
    names=SPARSE_NAMES,
)
