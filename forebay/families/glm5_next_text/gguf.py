"""GLM-5.3-Flash in GGUF. Draft blocks, which follow the model's own, are left out."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import EXPERTS, Architecture, Header, Tensors, within
from forebay.families.base.fields import is_number
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.experts import DENSE, SPARSE
from forebay.families.parts.gguf.kimi_delta import DELTA_KEYS, DELTA_NAMES, restore_delta
from forebay.families.parts.gguf.latent import (
    CHECKED,
    DRAFT,
    DRAFTING,
    KEYS,
    NAMES,
    configure_latent,
    leave_out_draft,
    restore_latent,
    without_draft,
)
from forebay.families.parts.gguf.streams import INDEX, LIMITS, MIXING, STREAMS, bare, limit
from forebay.families.parts.sparse_latent import FULL_INDEXER, SHARED_INDEXER

_LEADING: Final = "leading_dense_block_count"
_TAIL: Final = "attention.indexer.kpool_select_tail"
_INDEXERS: Final = "attention.indexer.types"
_INDEX_EPS: Final = "attention.layer_norm_epsilon"
_EPS: Final = 1e-6  # of the norm of an indexer's keys, as published
_UNUSED: Final = "attention.indexer.index_share_mtp"  # about blocks that draft
_POOL: Final = ("index_kpool_compress_ape", "index_kpool_compress_gate")
_INDEXER: Final = {
    "indexer.attn_k": "wk",
    "indexer.attn_q_b": "wq_b",
    "indexer.k_norm": "k_norm",
    "indexer.proj": "weights_proj",
    "indexer_compressor_ape": _POOL[0],
    "indexer_compressor_gate": _POOL[1],
}


def _configure(header: Header) -> None:
    """Complete the configuration. Raises ModelError for an indexer's norm with another epsilon."""
    own, config = header.own, header.config
    eps = own.get(_INDEX_EPS, _EPS)
    if not is_number(eps) or not math.isclose(eps, _EPS, rel_tol=1e-6):
        raise header.wrong(f"{_INDEX_EPS} is {brief(eps)}, not {_EPS}")
    config["swiglu_limit"] = limit(header)
    leave_out_draft(header)
    configure_latent(header, least_rotated=0)
    header.check_sigmoid()
    config.setdefault("linear_lower_bound", None)  # a null, which is not an absence, for none
    config.update(
        index_kpool_always_select_tail=own.get(_TAIL, False),
        indexer_types=_indexers(header),
        layer_types=header.kinds({"attn_kv_a_mqa": FULL}, LINEAR),
        linear_num_heads=config.get("num_attention_heads"),
        mlp_layer_types=_kinds_of_mlp(header),
        n_routed_experts=config.pop("num_experts", None),
        norm_topk_prob=bool(own.get("expert_weights_norm", False)),
    )


def _indexers(header: Header) -> list[str]:
    """Return whether each layer has its own indexer; all have if the file does not say. Raises ModelError for a list
    without a flag for each."""
    given, count = header.own.get(_INDEXERS), len(header.layers)
    flags = [True] * count if given is None else np.asarray(given).tolist()
    if not isinstance(flags, list) or len(flags) < count or not set(flags) <= {False, True}:
        raise header.wrong(f"{_INDEXERS} is {brief(given)}, not a flag for each layer")
    return [FULL_INDEXER if flag else SHARED_INDEXER for flag in flags[:count]]


def _kinds_of_mlp(header: Header) -> list[str]:
    count, dense = len(header.layers), header.config.pop("first_k_dense_replace", 0)
    if type(dense) is not int or not 0 <= dense <= count:
        raise header.wrong(f"{_LEADING} is {brief(dense)} of {count} layers")
    return [DENSE] * dense + [SPARSE] * (count - dense)


def _restore(tensors: Tensors) -> Tensors:
    """Undo what is done to latent attention and delta rules; give an indexer's pools names without a suffix."""
    return bare(restore_delta(restore_latent(tensors)), *_POOL)


ARCHITECTURES: Final = {
    "glm5-next": Architecture(
        block_names={
            **NAMES,
            **EXPERTS,
            **DELTA_NAMES,
            **within("self_attn.indexer", _INDEXER),
            **MIXING,
            **DRAFT,
        },
        keys={
            **KEYS,
            **DELTA_KEYS,
            **STREAMS,
            **INDEX,
            "attention.indexer.kpool": "index_kpool",
            "kda.gate_lower_bound": "linear_lower_bound",
        },
        checked=(*CHECKED, *LIMITS, DRAFTING, _TAIL, _INDEXERS, _INDEX_EPS, _UNUSED),
        configure=_configure,
        reorder=without_draft,
        restore=_restore,
    ),
}
