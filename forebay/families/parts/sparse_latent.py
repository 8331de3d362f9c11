"""Latent attention over selected tokens, as DeepSeek V3.2 has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import Index, Latent
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import GroupedExperts, mlp_layer_types
from forebay.families.parts.latent import DRAFT_HEAD, HARMLESS, LatentConfig, latent_transformer
from forebay.families.parts.latent import small as small_v3

FULL_INDEXER: Final = "full"
SHARED_INDEXER: Final = "shared"
INDEXER_FIELDS: Final = frozenset({"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "indexer_types"})
_LETTERS: Final = {"F": FULL_INDEXER, "S": SHARED_INDEXER}


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLatentConfig(LatentConfig):
    """`indexer_types`: for each layer, `full` for an indexer of its own, or `shared` for the selection of the last one
    before it."""

    index: Index
    indexer_types: tuple[str, ...]

    @property
    def sparse_top_k(self) -> int:
        return self.index.top_k


def sparse_latent(
    fields: Fields,
    defaults: Defaults,
    latent: Latent,
    experts: GroupedExperts,
    index: Index,
    indexer_types: tuple[str, ...],
) -> SparseLatentConfig:
    """Read the other fields of a transformer with latent attention and indexers, three dense layers by default. Raises
    ModelError for fields that contradict the layout."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    values = latent_transformer(fields, defaults, latent)
    fields.only("head_dim", values["head_dim"])
    return SparseLatentConfig(
        **values,
        latent=latent,
        experts=experts,
        mlp_layer_types=mlp_layer_types(fields, values["num_layers"], dense=3),
        index=index,
        indexer_types=indexer_types,
    )


def read_index(fields: Fields, latent: Latent, *, num_heads: int, interleaved: bool) -> Index:
    """Read the sizes of an indexer. Raises ModelError if its heads are smaller than their rotated part, and without a
    latent vector of queries."""
    if not latent.q_rank:
        raise fields.wrong("q_lora_rank", "a size: indexers read the queries' latent vector")
    return Index(
        num_heads=fields.size("index_n_heads", default=num_heads),
        head_dim=fields.size("index_head_dim", default=128, least=max(1, latent.rope_dim)),
        top_k=fields.size("index_topk", default=2048),
        interleaved=interleaved,
    )


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
    """Return the own fields of a small model, whose indexers select 64 tokens."""
    return {**small_v3(shape), "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}


SPARSE_HARMLESS: Final = HARMLESS | {"layer_types", "rope_interleave", "indexer_rope_interleave"}
SPARSE_NAMES: Final = TensorNames(stacked_experts=True, draft_layers=True, draft_head=DRAFT_HEAD)
