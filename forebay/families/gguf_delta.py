"""GGUF files of models with delta rules and latent attention: their names, metadata and stored forms, as llama.cpp's
converter writes them (its `conversion/qwen.py`, `deepseek.py` and `kimi_linear.py`).

Left out: OLMo hybrids and Ling 3, which have no architecture; DeepSeek's YaRN without the multiplier of its logarithm,
whose amplitude the files do not say; layers that draft tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError, brief
from forebay.families.architecture import Architecture, Tensors
from forebay.families.gguf_mixers import restore_mamba2
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import (
    F32,
    ComputedTensor,
    StoredTensor,
    less_one,
    one_below_the_other,
    read_tensor,
)

Order = npt.NDArray[np.int64]

_SIGMOID: Final = 2  # llama.cpp's number of that gating function
_MAX_LAYERS: Final = 4096

_MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN3_5: Final = {
    **_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LATENT: Final = {
    **_MLP,
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_DEEPSEEK: Final = {**_LATENT, **{name: here for name, here in _QWEN_EXPERTS.items() if name.endswith("_exps")}}
_KIMI: Final = {
    **_LATENT,
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt",
    "ssm_norm": "self_attn.o_norm",
}


def _configure_qwen(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    heads, inner, rotated, head_dim = (
        _whole(file, own, key)
        for key in ("ssm.time_step_rank", "ssm.inner_size", "rope.dimension_count", "attention.key_length")
    )
    if inner % heads or rotated > head_dim:
        raise ModelError(
            f"{file.path}: {inner} channels of the delta nets for {heads} heads, {rotated} of {head_dim} rotated"
        )
    if own.get("nextn_predict_layers"):
        raise ModelError(
            f"{file.path}: its last {brief(own['nextn_predict_layers'])} blocks draft tokens: not supported"
        )
    config |= {
        "linear_value_head_dim": inner // heads,
        "partial_rotary_factor": min(1.0, (rotated + 0.5) / head_dim),  # which is rounded down to `rotated` again
        "layer_types": _layer_types(file, config, "attn_q"),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "norm_topk_prob": True,  # the format has no key for it, and llama.cpp takes it for granted
    }


def _configure_latent(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    if own.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(f"{file.path}: the expert gating function {brief(own['expert_gating_func'])} is not supported")
    rotated, key, rank = (
        _whole(file, own, name)
        for name in ("rope.dimension_count", "attention.key_length_mla", "attention.kv_lora_rank")
    )
    if own.get("attention.key_length", rank + rotated) != rank + rotated:
        raise ModelError(
            f"{file.path}: {brief(own['attention.key_length'])} entries of a key, not {rank} and {rotated}"
        )
    config |= {
        "q_lora_rank": config.get("q_lora_rank"),  # a null, which is not an absence, for none
        "qk_nope_head_dim": key - rotated,
        "num_key_value_heads": None,
        "head_dim": None,
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "attention_bias": any(name.endswith(".attn_kv_a_mqa.bias") for name in file.tensors),
    }


def _configure_deepseek(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _configure_latent(file, own, config)
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["norm_topk_prob"] = bool(own.get("expert_weights_norm", False))
    scaling = config["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        return
    multiplier = own.get("rope.scaling.yarn_log_multiplier")
    if not isinstance(multiplier, float) or multiplier <= 0:
        raise ModelError(
            f"{file.path}: a yarn_log_multiplier of {brief(multiplier)}: the rope's amplitude is ambiguous"
        )
    # It is a tenth of mscale_all_dim, in single precision; that mscale is the same is what llama.cpp takes for granted.
    scaling["mscale"] = scaling["mscale_all_dim"] = round(multiplier / 0.1, 6)
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in own:
            scaling[name] = own[f"rope.scaling.yarn_{name}"]


def _configure_kimi(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _configure_latent(file, own, config)
    config |= {
        "layer_types": _layer_types(file, config, "attn_kv_a_mqa"),
        "linear_num_heads": config.get("num_attention_heads"),
        "norm_topk_prob": True,  # the format has no key for it, and llama.cpp takes it for granted
    }


def _whole(file: GgufFile, own: Mapping[str, Any], key: str) -> int:
    value = own.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"{file.path}: {key} is {str(value)[:60]}, not a whole number above 0")
    return value


def _layer_types(file: GgufFile, config: Mapping[str, Any], sign: str) -> list[str]:
    """Those of which the file has a weight `sign` are attention."""
    count = config.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= _MAX_LAYERS:
        raise ModelError(f"{file.path}: block_count is {str(count)[:60]}")
    full = [f"blk.{layer}.{sign}.weight" in file.tensors for layer in range(count)]
    return ["full_attention" if there else "linear_attention" for there in full]


def _reorder_qwen3_5(tensors: Tensors, extra: Mapping[str, Any]) -> Tensors:
    """Value heads are stored turn by turn: the first of each key head, then the second of each, and so on."""
    key_heads, heads = extra["linear_num_key_heads"], extra["linear_num_value_heads"]
    keys, value = 2 * key_heads * extra["linear_key_head_dim"], extra["linear_value_head_dim"]

    def order(size: int, *, behind: int = 0) -> Order:
        """Where in the file the rows of heads of `size` rows each are, behind others that are in order."""
        rows = np.arange(heads * size).reshape(heads // key_heads, key_heads, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(behind), behind + rows])

    orders = {
        "in_proj_qkv.weight": (order(value, behind=keys), 0),
        "conv1d.weight": (order(value, behind=keys), 0),
        "in_proj_z.weight": (order(value), 0),
        "in_proj_b.weight": (order(1), 0),
        "in_proj_a.weight": (order(1), 0),
        "A_log": (order(1), 0),
        "dt.bias": (order(1), 0),
        "out_proj.weight": (order(value), 1),
    }
    reordered = {}
    for name, tensor in tensors.items():
        _, _, part = name.partition(".linear_attn.")
        reordered[name] = _taken(tensor, *orders[part]) if part in orders else tensor
    return reordered


def _taken(tensor: StoredTensor, order: Order, axis: int) -> StoredTensor:
    """A tensor of another shape than it should have is left for the check of all shapes."""
    if len(tensor.shape) <= axis or tensor.shape[axis] != len(order):
        return tensor

    def pieces() -> Iterator[F32]:
        yield np.ascontiguousarray(np.atleast_2d(read_tensor(tensor).take(order, axis=axis)))

    codes = tensor.codes
    if codes is not None:
        codes = codes.rows(order) if axis == 0 else codes.columns(order)
    return ComputedTensor(tensor.shape, [tensor], pieces, codes)


def _reorder_qwen3_next(tensors: Tensors, extra: Mapping[str, Any]) -> Tensors:
    """q, k and v of all heads, and the gates, are stored one after the other instead of by key head; the fused layer is
    as old files have it."""
    heads = extra["linear_num_key_heads"]
    keys = heads * extra["linear_key_head_dim"]
    values = extra["linear_num_value_heads"] * extra["linear_value_head_dim"]
    starts = np.cumsum([0, keys, keys, values])
    parts = zip(starts, (keys, keys, values, values), strict=True)
    order = np.concatenate([first + np.arange(size).reshape(heads, -1) for first, size in parts], axis=1).reshape(-1)
    reordered = dict(tensors)
    for name in tensors:
        if name.endswith(".in_proj_qkv.weight"):
            stem = name.removesuffix("qkv.weight")
            gate = reordered.pop(f"{stem}z.weight", None)
            if gate is None:
                raise ModelError(f"{name}: there is no gate")
            reordered[f"{stem}qkvz.weight"] = _taken(one_below_the_other(reordered.pop(name), gate), order, 0)
    return reordered


def _restore_qwen(tensors: Tensors) -> Tensors:
    """Norm weights are stored as they are used, but for that behind the delta rule; a layer of one output is flat."""
    restored: Tensors = {}
    for name, tensor in restore_mamba2(tensors).items():
        if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            restored[name] = less_one(tensor)
        elif name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
            restored[name] = ComputedTensor((1, *tensor.shape), [tensor], tensor.pieces)
        else:
            restored[name] = tensor
    return restored


def _restore_latent(tensors: Tensors) -> Tensors:
    """What makes keys of latent vectors is parted from what makes values, and stored with inputs before outputs."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".k_b_proj.weight"):
            values = tensors.get(name.replace(".k_b_proj.", ".v_b_proj."))
            if values is None or len(tensor.shape) != 3 or tensor.shape[:2] != (values.shape[0], values.shape[-1]):
                raise ModelError(f"{name}: there is no part for values of the same heads")
            restored[name.replace(".k_b_proj.", ".kv_b_proj.")] = _keys_and_values(tensor, values)
        elif not name.endswith(".v_b_proj.weight"):
            restored[name.replace(".e_score_correction.bias", ".e_score_correction_bias")] = tensor
    return restored


def _keys_and_values(keys: StoredTensor, values: StoredTensor) -> StoredTensor:
    """keys [Hq, C, N] and values [Hq, Dv, C] -> [Hq * (N + Dv), C]."""
    heads, rank, size = keys.shape

    def pieces() -> Iterator[F32]:
        both = [read_tensor(keys).swapaxes(1, 2), read_tensor(values)]
        yield np.concatenate(both, axis=1).reshape(-1, rank)

    return ComputedTensor((heads * (size + values.shape[1]), rank), [keys, values], pieces)


_KIMI_KERNEL: Final = re.compile(r".*\.[qkv]_conv1d\.weight")


def _restore_kimi(tensors: Tensors) -> Tensors:
    """Kernels and decays have their ones elsewhere."""
    restored: Tensors = {}
    for name, tensor in _restore_latent(restore_mamba2(tensors)).items():
        if _KIMI_KERNEL.fullmatch(name):
            channels = int(np.prod(tensor.shape[:-1]))
            restored[name] = ComputedTensor((channels, 1, tensor.shape[-1]), [tensor], tensor.pieces)
        elif name.endswith(".A_log"):
            restored[name] = ComputedTensor((1, 1, *tensor.shape, 1), [tensor], tensor.pieces)
        else:
            restored[name] = tensor
    return restored


_QWEN_KEYS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_QWEN_CHECKED: Final = (
    "ssm.inner_size",
    "full_attention_interval",
    "rope.dimension_count",
    "rope.dimension_sections",  # of pictures' axes, which all have a text's position
    "nextn_predict_layers",
)
_LATENT_KEYS: Final = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_LATENT_CHECKED: Final = (
    "attention.head_count_kv",
    "attention.value_length",
    "attention.key_length_mla",
    "expert_gating_func",
    "expert_weights_norm",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)

ARCHITECTURES: Final = {
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        block_names=_QWEN3_5,
        keys=_QWEN_KEYS,
        checked=_QWEN_CHECKED,
        configure=_configure_qwen,
        reorder=_reorder_qwen3_5,
        restore=_restore_qwen,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        block_names={**_QWEN3_5, **_QWEN_EXPERTS},
        keys=_QWEN_KEYS,
        checked=_QWEN_CHECKED,
        configure=_configure_qwen,
        reorder=_reorder_qwen3_5,
        restore=_restore_qwen,
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        block_names={
            **_QWEN3_5,
            **_QWEN_EXPERTS,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        keys=_QWEN_KEYS,
        checked=_QWEN_CHECKED,
        configure=_configure_qwen,
        reorder=_reorder_qwen3_next,
        restore=_restore_qwen,
    ),
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        block_names=_DEEPSEEK,
        keys=_LATENT_KEYS,
        checked=_LATENT_CHECKED,
        configure=_configure_deepseek,
        restore=_restore_latent,
    ),
    "kimi-linear": Architecture(
        model_type="kimi_linear",
        block_names=_KIMI,
        keys={**_LATENT_KEYS, "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"},
        checked=_LATENT_CHECKED,
        configure=_configure_kimi,
        restore=_restore_kimi,
    ),
}
