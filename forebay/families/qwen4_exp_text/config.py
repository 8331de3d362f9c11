from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import GatedStreams, Ngrams, PooledIndex
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts import shared_experts
from forebay.families.parts.gated_delta import HARMLESS, NAMES, GatedValues, gated_transformer
from forebay.families.parts.shared_experts import Qwen35MoeConfig, qwen_experts
from forebay.families.qwen4_exp_text.ngrams import ngrams

# transformers' name of layers with attention, and that of published files.
_INDEXED: Final = ("indexed_attention", "qwen_sparse_attention")
_MOST_POOL: Final = 1024
_MOST_STREAMS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen4Config(Qwen35MoeConfig):
    """Qwen3.5's configuration with indexers of pools, residual streams, embeddings of n-grams in some layers, and the
    kind of the delta rule's gate."""

    index: PooledIndex
    streams: GatedStreams
    ngrams: Ngrams | None
    norm_topk_prob: bool
    sigmoid_gate: bool

    @property
    def draft_size(self) -> int:
        return self.streams.number * self.hidden_size

    @property
    def sparse_top_k(self) -> int:
        return self.index.top_k + self.index.pool - 1


def parse(fields: Fields) -> Qwen4Config:
    """Read Qwen 4's fields."""
    inner = fields.size("moe_intermediate_size", default=512)  # every layer has experts
    whole = fields.dropped("intermediate_size").replaced(intermediate_size=inner)
    values = gated_transformer(_layers_renamed(whole), rotated=1.0)
    index = _index(fields, values["rotary_dim"])
    gate = fields.get("output_gate_type", "silu")
    if gate not in ("silu", "sigmoid"):
        raise fields.wrong("output_gate_type", "silu or sigmoid")
    return Qwen4Config(
        **values,
        **qwen_experts(fields, number=512, per_token=10),
        page_multiple=index.pool,
        index=index,
        streams=GatedStreams(
            number=fields.size("hc_count", default=4, least=2, most=_MOST_STREAMS),
            rank=fields.size("hc_lowrank", default=320),
        ),
        ngrams=_ngrams(fields, values),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        sigmoid_gate=gate == "sigmoid",
    )


def _ngrams(fields: Fields, values: GatedValues) -> Ngrams | None:
    """Read the embeddings of n-grams, which only layers with a delta rule have, as in transformers."""
    found = ngrams(
        fields,
        num_layers=values["num_layers"],
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
    )
    if found is not None and any(values["layer_types"][layer] != LINEAR for layer in found.layers):
        raise fields.wrong("ple_layer_ids", "numbers of layers with linear_attention")
    return found


def _layers_renamed(fields: Fields) -> Fields:
    """Return the fields with one name for layers with attention: files have either."""
    given = fields.get("layer_types")
    if not isinstance(given, list):
        return fields
    return fields.replaced(layer_types=[FULL if kind in _INDEXED else kind for kind in given])


def _index(fields: Fields, rotary_dim: int) -> PooledIndex:
    fields.only("indexer_kv_heads", 1)
    pool = fields.size("indexer_compress_ratio", least=2, most=_MOST_POOL)
    index = PooledIndex(
        num_heads=fields.size("indexer_n_heads"),
        head_dim=fields.size("indexer_head_dim", least=rotary_dim),
        top_k=fields.size("indexer_budget"),
        interleaved=False,
        pool=pool,
    )
    if index.top_k % pool:
        raise fields.wrong("indexer_budget", f"a multiple of indexer_compress_ratio, {pool}")
    return index


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a delta rule, then one with attention, whose indexers
    select 4 pools of 16 tokens. The first has embeddings of n-grams."""
    return {
        **shared_experts.small(shape),
        "eos_token_id": 0,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "hc_count": 2,
        "hc_lowrank": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }


_DERIVED: Final = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")


def _unused(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor follows from the configuration, or is of the indexer of the layer that drafts, which
    attends to all tokens here."""
    return name.endswith(_DERIVED) or name.startswith(f"model.layers.{config.num_layers}.self_attn.indexer.")


_TABLES: Final = frozenset({
    "ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by", "number_of_conv_states", "seed", "split_ngram_parts",
})  # fmt: skip

_DRAFT_HEAD: Final = (
    ("mtp.pre_fc_norm_embedding.", "model.layers.{0}.enorm."),
    ("mtp.pre_fc_norm_hidden.", "model.layers.{0}.hnorm."),
    ("mtp.fc_embedding.", "model.layers.{0}.e_proj."),
    ("mtp.fc_hidden.", "model.layers.{0}.h_proj."),
    ("mtp.hyper_connection_mixer.", "model.layers.{0}.hyper_connection_mixer."),
    ("mtp.layers.0.", "model.layers.{0}."),
)
_NAMES: Final = replace(NAMES, by_row=".ngram_embedding.", draft_head=_DRAFT_HEAD)

FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS | _TABLES, names=_NAMES, unused=_unused)
