"""DeepSeek V4 in GGUF. Draft blocks, which follow the model's own, are left out."""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import TOP_NAMES, YARN_KEYS, Architecture, Header, Tensors, expert_names, within
from forebay.families.parts.gguf.latent import DRAFT, DRAFTING, leave_out_draft, without_draft
from forebay.families.parts.gguf.streams import INDEX, LIMITS, MIXING, STREAMS, bare, limit

_SQRT_SOFTPLUS: Final = 4  # llama.cpp's number of that gating function
_RATIOS: Final = "attention.compress_ratios"
_COMPRESSOR: Final = {"kv": "wkv", "gate": "wgate", "ape": "ape", "norm": "norm"}
_MATRICES: Final = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
_ATTENTION: Final = {
    "attn_sinks": "attn_sink",
    "attn_q_a": "wq_a",
    "attn_q_a_norm": "q_norm",
    "attn_q_b": "wq_b",
    "attn_kv": "wkv",
    "attn_kv_a_norm": "norm",
    "attn_output_a": "wo_a",
    "attn_output_b": "wo_b",
    **within("compressor", {f"attn_compressor_{stored}": name for stored, name in _COMPRESSOR.items()}),
    "indexer.attn_q_b": "indexer.wq_b",
    "indexer.proj": "indexer.weights_proj",
    **within("indexer.compressor", {f"indexer_compressor_{stored}": name for stored, name in _COMPRESSOR.items()}),
}
_JOINS: Final = ("e_proj", "h_proj", "hc_head_fn", "hc_head_base", "hc_head_scale")  # that drafting blocks have
_HEAD: Final = within("model.hc_head", {f"output_hc_{kind}": f"hc_{kind}" for kind in ("fn", "base", "scale")})


def _configure(header: Header) -> None:
    own, config = header.own, header.config
    if own.get("expert_gating_func") != _SQRT_SOFTPLUS:
        raise header.wrong(f"the expert gating function {brief(own.get('expert_gating_func'))} is not supported")
    config["swiglu_limit"] = limit(header)
    if header.has("nextn.enorm.weight"):  # files without such blocks may count them
        leave_out_draft(header)
    ratios = own.get(_RATIOS)
    config["compress_ratios"] = ratios.tolist() if isinstance(ratios, np.ndarray) else ratios
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["intermediate_size"] = None  # no layer has an MLP but its experts
    header.yarn_options()


def _restore(tensors: Tensors) -> Tensors:
    return bare(tensors, "attn_sink", "ape", "tid2eid")


ARCHITECTURES: Final = {
    "deepseek4": Architecture(
        block_names={
            "attn_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            **within("attn", _ATTENTION),
            "ffn_gate_inp": "ffn.gate",
            "exp_probs_b": "ffn.gate",
            "ffn_gate_tid2eid": "ffn.gate.tid2eid",
            **expert_names("ffn", _MATRICES),
            **within("ffn.shared_experts", {f"{stored}_shexp": name for stored, name in _MATRICES.items()}),
            **MIXING,
            **DRAFT,
            **{f"nextn.{name}": name for name in _JOINS},
        },
        top_names={**TOP_NAMES, **_HEAD},
        keys={
            **STREAMS,
            **INDEX,
            "attention.compress_rope_freq_base": "compress_rope_theta",
            "attention.output_group_count": "o_groups",
            "attention.output_lora_rank": "o_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.sliding_window": "sliding_window",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "hash_layer_count": "num_hash_layers",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        checked=(_RATIOS, *LIMITS, DRAFTING, *YARN_KEYS, "expert_gating_func"),
        configure=_configure,
        reorder=without_draft,
        restore=_restore,
    ),
}
