from __future__ import annotations

import re
from typing import Any, Final

from forebay.base.errors import brief
from forebay.families.base.architecture import ATTENTION, EXPERTS, Architecture, Header, Tensors
from forebay.families.parts.gguf import exaone as exaone4
from forebay.families.parts.gguf.latent import NAMES

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_DRAFT: Final = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")


def _configure(header: Header) -> None:
    """The last blocks may draft tokens: they are not among the model's layers."""
    own, config = header.own, header.config
    header.check_sigmoid()
    drafting, blocks = own.get("nextn_predict_layers", 0), len(header.layers)
    if type(drafting) is not int or not 0 <= drafting < blocks:
        raise header.wrong(f"{brief(drafting)} of {blocks} blocks draft tokens")
    config["num_hidden_layers"] = blocks - drafting
    exaone4.configure(header)
    config["norm_topk_prob"] = bool(own.get("expert_weights_norm", False))


def _without_drafting(tensors: Tensors, config: Any) -> Tensors:
    def drafts(name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) >= config.num_layers

    return {name: tensor for name, tensor in tensors.items() if not drafts(name)}


def _restore(tensors: Tensors) -> Tensors:
    name = "gate.e_score_correction"
    return {stored.replace(f"{name}.bias", f"{name}_bias"): tensor for stored, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "exaone-moe": Architecture(
        block_names={**NAMES, **ATTENTION, **EXPERTS, **{f"nextn.{name}": name for name in _DRAFT}},
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_shared_count": "num_shared_experts",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        checked=(
            "attention.sliding_window_pattern",
            "expert_gating_func",
            "expert_shared_feed_forward_length",
            "expert_weights_norm",
            "nextn_predict_layers",
        ),
        configure=_configure,
        reorder=_without_drafting,
        restore=_restore,
    )
}
