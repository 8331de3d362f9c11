"""Names of Gemma 4 in GGUF. Left out: what transformers' model cannot be, as with a window in its last layer, or with
different numbers of heads in layers of one kind."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import ATTENTION, GATED, MLP, TOP_NAMES, Architecture, Header, Tensors
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.gemma4_text.config import FAMILY
from forebay.families.parts.gemma4 import Gemma4Config

_NOT_ROTATED: Final = 1e29  # llama.cpp divides by 1e30 the frequencies that are to be none

_TOP_NAMES: Final = {
    **TOP_NAMES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_BLOCK_NAMES: Final = {
    **ATTENTION,
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
    **{f"{stored}_exps": f"experts.{{}}.{name}" for stored, name in GATED.items()},
    "ffn_down_exps.scale": "router.per_expert_scale",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}


def _configure(header: Header) -> None:
    """Complete the configuration. Raises ModelError for metadata that contradict each other or the model."""
    own, config = header.own, header.config
    kinds = _kinds(header)
    full, windowed = (_head_dim(header, suffix) for suffix in ("", "_swa"))
    first_reader = len(kinds) - _count(header, "attention.shared_kv_layers", default=0)
    per_layer_size = _count(header, "embedding_length_per_layer_input")
    per_layer = header.file.tensors.get("per_layer_token_embd.weight")
    if per_layer is not None:
        config["vocab_size_per_layer_input"] = per_layer.shape[0]
    counts = _kv_heads(header, kinds)
    config.update(
        layer_types=kinds,
        rope_parameters=_ropes(header, full // 2),
        head_dim=windowed,
        sliding_window=header.whole("attention.sliding_window"),
        num_key_value_heads=counts[SLIDING],
        per_layer_config={
            str(layer): {"head_dim": full, "num_key_value_heads": counts[FULL]}
            for layer, kind in enumerate(kinds)
            if kind == FULL
        },
        attention_k_eq_v=_values_from_keys(header, kinds[:first_reader]),
        hidden_size_per_layer_input=per_layer_size,
        # Files have no flag of it: those published with inputs of layers (E2B, E4B) are causal, all others are not.
        use_bidirectional_attention=None if per_layer_size else "vision",
        enable_moe_block=bool(config.get("num_experts")),
        top_k_experts=config.pop("num_experts_per_tok", None),
        **_widths(header, first_reader),
    )
    for key in ("rope_theta", "rope_scaling"):
        config.pop(key, None)
    if not own.get("final_logit_softcapping", 1.0):  # 0 for none
        config.pop("final_logit_softcapping")


def _kinds(header: Header) -> list[str]:
    key = "attention.sliding_window_pattern"
    flags = _entries(header, key)
    if not isinstance(flags, list) or any(type(flag) is not bool for flag in flags) or flags[-1]:
        raise header.wrong(f"{key} is {brief(flags)}, not a flag for each layer of which the last has no window")
    return [SLIDING if flag else FULL for flag in flags]


def _entries(header: Header, key: str) -> Any:
    """The metadata's value of `key`: as it is, or a list of an entry for each layer."""
    value = header.own.get(key)
    if not isinstance(value, list | np.ndarray):
        return value
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    if len(entries) != len(header.layers):
        raise header.wrong(f"{key} has {len(entries)} entries for {len(header.layers)} layers")
    return entries


def _count(header: Header, key: str, *, default: int | None = None) -> int:
    """Return the metadata's value of `key`, a whole number which may be 0. ModelError for anything else."""
    value = header.own.get(key, default)
    if type(value) is not int or value < 0:
        raise header.wrong(f"{key} is {brief(value)}, not a whole number")
    return value


def _head_dim(header: Header, suffix: str) -> int:
    """Return the size of heads of one kind of attention. All of a head is rotated, or the rope's factors say what."""
    size = header.whole(f"attention.key_length{suffix}")
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if header.own.get(key, size) != size:
            raise header.wrong(f"{key} is {brief(header.own[key])} and the head size {size}: unsupported")
    return size


def _kv_heads(header: Header, kinds: list[str]) -> dict[str, Any]:
    """Return the number of KV heads of each kind of attention; of one that no layer has, as many as of the other."""
    entries = _entries(header, "attention.head_count_kv")
    if not isinstance(entries, list):
        return dict.fromkeys((SLIDING, FULL), entries)
    found = {kind: {n for n, other in zip(entries, kinds, strict=True) if other == kind} for kind in (SLIDING, FULL)}
    if any(len(counts) > 1 for counts in found.values()):
        raise header.wrong(f"attention.head_count_kv is {brief(entries)}: layers of a kind have the same number")
    return {kind: next(iter(counts or found[FULL])) for kind, counts in found.items()}


def _widths(header: Header, first_reader: int) -> dict[str, Any]:
    """Return the size of the MLPs, and whether layers that read another's KV have MLPs of twice the size."""
    entries, key = _entries(header, "feed_forward_length"), "feed_forward_length"
    if not isinstance(entries, list):
        return {"intermediate_size": entries, "use_double_wide_mlp": False}
    size = entries[0]
    plain = [size] * len(entries)
    wide = plain[:first_reader] + [2 * size] * (len(entries) - first_reader) if type(size) is int else plain
    if entries not in (plain, wide):
        raise header.wrong(f"{key} is {brief(entries)}: neither the same for all nor twice of that for the last")
    return {"intermediate_size": size, "use_double_wide_mlp": entries != plain}


def _values_from_keys(header: Header, kinds: list[str]) -> bool:
    """Return whether layers without a window have no values of their own. ModelError where only some have."""
    there = {f"blk.{layer}.attn_v.weight" in header.file.tensors for layer, kind in enumerate(kinds) if kind == FULL}
    if len(there) > 1:
        raise header.wrong("some layers without a window have attn_v and others have none: unsupported")
    return there == {False}


def _ropes(header: Header, num_frequencies: int) -> dict[str, dict[str, Any]]:
    """Return the rope of each kind of attention. The factors of layers without a window say how many frequencies there
    are: 1 for each of these, and then as good as infinity."""
    own, scaling = header.own, header.config.get("rope_scaling")
    if own.get("rope.freq_base_swa") is None or own.get("rope.freq_base") is None:
        raise header.wrong("rope.freq_base or rope.freq_base_swa is missing: convert the model again")
    if scaling is None or scaling["rope_type"] != "frequency_factors":
        raise header.wrong(
            "rope_freqs, which says how much of a head is rotated, is missing; no other scaling is known"
        )
    factors = scaling["factors"]
    kept = next((i for i, factor in enumerate(factors) if factor != 1), len(factors))
    if len(factors) != num_frequencies or not kept or not all(factor > _NOT_ROTATED for factor in factors[kept:]):
        raise header.wrong(
            f"rope_freqs is {brief(factors)}, not {num_frequencies} factors that are 1 and from some on 1e30"
        )
    share = kept / num_frequencies
    if int(share * num_frequencies) < kept:
        share = (kept + 0.5) / num_frequencies  # which is rounded down to `kept`
    return {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": own["rope.freq_base"],
            "partial_rotary_factor": share,
        },
        SLIDING: {"rope_type": "default", "rope_theta": own["rope.freq_base_swa"]},
    }


def _without_unused(tensors: Tensors, config: Gemma4Config) -> Tensors:
    """Leave out keys and values of layers that read those of others."""
    return {name: tensor for name, tensor in tensors.items() if not FAMILY.unused(config, name)}


def _restore(tensors: Tensors) -> Tensors:
    """A layer's factor has no suffix."""
    return {name.replace(".layer_scalar.weight", ".layer_scalar"): tensor for name, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "gemma4": Architecture(
        block_names=_BLOCK_NAMES,
        top_names=_TOP_NAMES,
        keys={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        checked=(
            "attention.head_count_kv",
            "attention.key_length_swa",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attention.value_length_swa",
            "embedding_length_per_layer_input",
            "feed_forward_length",
            "rope.dimension_count",
            "rope.dimension_count_swa",
            "rope.freq_base_swa",
        ),
        configure=_configure,
        reorder=_without_unused,
        restore=_restore,
    ),
}
