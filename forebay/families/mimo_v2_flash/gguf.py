"""Left out: blocks that draft, which are not read; q, k and v in one tensor, as later models have them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import ATTENTION, EXPERTS, MLP, Architecture, Header, Tensors
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.parts.experts import DENSE, SPARSE
from forebay.families.parts.gguf.latent import DRAFT, DRAFTING, leave_out_draft, without_draft

_NAMES: Final = {
    **ATTENTION,
    **MLP,
    **EXPERTS,
    "attn_norm": "input_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction",
    **DRAFT,
}


def _configure(header: Header) -> None:
    """Complete the configuration. Raises ModelError for metadata that contradicts itself, and for a file of before the
    scale of values was written."""
    header.check_sigmoid()
    own, config = header.own, header.config
    leave_out_draft(header)
    if "attention.value_scale" not in own:
        raise header.wrong("there is no attention.value_scale: convert the model again with a newer llama.cpp")
    if config.pop("rope_scaling") is not None:
        raise header.wrong("a scaled rope is not supported")
    kinds = [SLIDING if windowed else FULL for windowed in _each(header, "attention.sliding_window_pattern")]
    head_dim, rotated = header.whole("attention.key_length"), header.whole("rope.dimension_count")
    bases = {FULL: config.pop("rope_theta", None), SLIDING: own.get("rope.freq_base_swa", 10_000.0)}
    share = min(1.0, (rotated + 0.5) / head_dim)  # which is rounded down to `rotated` again
    config.update(
        n_routed_experts=config.pop("num_experts", None),
        layer_types=kinds,
        mlp_layer_types=header.kinds({"ffn_gate_inp": SPARSE}, DENSE),
        num_key_value_heads=_kv_heads(header, kinds),
        sliding_window=header.whole("attention.sliding_window") + 1,  # the file's is without the query itself
        rope_parameters={kind: {"rope_theta": base, "partial_rotary_factor": share} for kind, base in bases.items()},
    )


def _each(header: Header, key: str) -> list[Any]:
    """The metadata's list of an entry for each layer, without those that draft."""
    value, num_layers = header.own.get(key), len(header.layers)
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(entries, list) or len(entries) < num_layers:
        raise header.wrong(f"{key} is {brief(entries)}, not a list of {num_layers}")
    return entries[:num_layers]


def _kv_heads(header: Header, kinds: list[str]) -> int:
    """Return the KV heads of layers without a window: half of what the others have."""
    key = "attention.head_count_kv"
    counts = {entry if kind == FULL else entry / 2 for kind, entry in zip(kinds, _each(header, key), strict=True)}
    count = counts.pop()
    if counts or count < 1 or count != int(count):
        raise header.wrong(f"{key} is {brief(header.own[key])}: layers with a window have twice as many as the others")
    return int(count)


def _restore(tensors: Tensors) -> Tensors:
    """Sinks have no suffix."""
    suffixes = {".sinks.weight": ".sinks", ".e_score_correction.bias": ".e_score_correction_bias"}
    restored: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, ours in suffixes.items():
            name = name.replace(theirs, ours)
        restored[name] = tensor
    return restored


ARCHITECTURES: Final = {
    "mimo2": Architecture(
        block_names=_NAMES,
        keys={
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
        },
        checked=(
            "attention.head_count_kv",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "expert_gating_func",
            "expert_weights_norm",
            DRAFTING,
            "rope.dimension_count",
            "rope.freq_base_swa",
        ),
        configure=_configure,
        reorder=without_draft,
        restore=_restore,
    ),
}
