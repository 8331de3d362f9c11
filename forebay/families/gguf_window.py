"""GGUF files of models with short convolutions, windows and sinks: their names, metadata and stored forms.

As llama.cpp's converter writes them and its `llama-model.cpp` reads them: what the files do not say (which layers have
a window, the rotary base of these, Gemma's score scale) is what llama.cpp takes for granted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families.architecture import TOP_NAMES, Architecture, Tensors
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import F32, ComputedTensor, StoredTensor, less_one, read_tensor

_SIGMOID: Final = 2  # llama.cpp's number of that gating function
_GEMMA3_27B_LAYERS: Final = 62
_EXPERT: Final = re.compile(r"(.*\.mlp\.experts)\.0\.(gate|down)_proj\.(weight|bias)")

_LFM2_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}
_LFM2_MOE_NAMES: Final = {
    **_LFM2_NAMES,
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
_GEMMA3_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def _configure_lfm2(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Layers without KV heads are convolutions."""
    given = own.get("attention.head_count_kv")
    heads = given.tolist() if isinstance(given, np.ndarray) else []
    if not heads or not all(type(count) is int and count in (0, max(heads)) for count in heads):
        raise ModelError(f"{file.path}: lfm2's KV heads are {str(given)[:80]}, not 0 or one number for each layer")
    config["num_key_value_heads"] = max(heads) or config.get("num_attention_heads")
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    config["norm_eps"] = config.pop("rms_norm_eps", None)


def _configure_dense_lfm2(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _configure_lfm2(file, own, config)
    config["block_auto_adjust_ff_dim"] = False


def _configure_lfm2_moe(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _configure_lfm2(file, own, config)
    if own.get("expert_gating_func") != _SIGMOID:
        raise ModelError(
            f"{file.path}: the expert gating function {brief(own.get('expert_gating_func'))} is not supported"
        )
    config["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    config["norm_topk_prob"] = True


def _restore_lfm2(tensors: Tensors) -> Tensors:
    """The kernel of a convolution has a dimension more, and the experts' bias no `.bias` to its name."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv.conv.weight"):
            restored[name] = ComputedTensor((tensor.shape[0], 1, *tensor.shape[1:]), [tensor], tensor.pieces)
        else:
            restored[name.replace(".expert_bias.bias", ".expert_bias")] = tensor
    return restored


def _configure_gemma3(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    hidden_size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    scalar = config.get("head_dim")
    if config.get("num_hidden_layers") == _GEMMA3_27B_LAYERS and type(hidden_size) is type(heads) is int and heads:
        scalar = hidden_size // heads
    config["query_pre_attn_scalar"] = scalar


def _restore_gemma3(tensors: Tensors) -> Tensors:
    """Norm weights are stored as they are used, not as differences from 1."""
    return {name: less_one(tensor) if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def _configure_gpt_oss(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in own:
                scaling[name] = own[f"rope.scaling.yarn_{name}"]


def _restore_gpt_oss(tensors: Tensors) -> Tensors:
    """Experts are stacked again, weights with inputs before outputs, gate and up in turns; sinks have no suffix."""
    restored = {name.replace(".sinks.weight", ".sinks"): t for name, t in tensors.items() if ".experts." not in name}
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            experts, part, kind = match.groups()
            suffix = "" if kind == "weight" else "_bias"
            parts = ("gate_proj", "up_proj") if part == "gate" else ("down_proj",)
            stacked = "gate_up_proj" if part == "gate" else "down_proj"
            of_experts = [_experts(tensors, f"{experts}.{{}}.{own}.{kind}") for own in parts]
            if len({tensor.shape for part in of_experts for tensor in part}) > 1 or not all(of_experts):
                raise ModelError(f"{name}: the experts' tensors do not have one shape")
            restored[f"{experts}.{stacked}{suffix}"] = _in_turns(of_experts)
    return restored


def _experts(tensors: Tensors, name: str) -> list[StoredTensor]:
    """Those of a `name` with a `{}` for the number, from 0 on."""
    found: list[StoredTensor] = []
    while (tensor := tensors.get(name.format(len(found)))) is not None:
        found.append(tensor)
    return found


def _in_turns(parts: list[list[StoredTensor]]) -> StoredTensor:
    """`parts` are, for gate and up or for down alone, each expert's weight [N, K] or bias [N]; one tensor [E, K, N] or
    [E, N] of all, where N is over the parts in turns."""
    first = parts[0][0].shape
    outputs = first[0] * len(parts)

    def pieces() -> Iterator[F32]:
        for of_expert in zip(*parts, strict=True):
            values = np.stack([read_tensor(tensor) for tensor in of_expert], axis=1).reshape(outputs, -1)
            yield np.ascontiguousarray(values.T)

    sources = [tensor for part in parts for tensor in part]
    return ComputedTensor((len(parts[0]), *first[1:], outputs), sources, pieces)


ARCHITECTURES: Final = {
    "lfm2": Architecture(
        model_type="lfm2",
        block_names=_LFM2_NAMES,
        top_names={**TOP_NAMES, "token_embd_norm": "model.embedding_norm"},
        keys={"shortconv.l_cache": "conv_L_cache"},
        checked=("attention.head_count_kv",),
        configure=_configure_dense_lfm2,
        restore=_restore_lfm2,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        block_names=_LFM2_MOE_NAMES,
        top_names={**TOP_NAMES, "token_embd_norm": "model.embedding_norm"},
        keys={"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
        checked=("attention.head_count_kv", "expert_gating_func"),
        configure=_configure_lfm2_moe,
        restore=_restore_lfm2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        block_names=_GEMMA3_NAMES,
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        configure=_configure_gemma3,
        restore=_restore_gemma3,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        block_names=_GPT_OSS_NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        configure=_configure_gpt_oss,
        restore=_restore_gpt_oss,
    ),
}
