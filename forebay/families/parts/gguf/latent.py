"""Names and keys of latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families.base.architecture import GATED, MLP, Header, Tensors, within
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor, read_tensor

SHARED_EXPERTS: Final = within("mlp.shared_experts", {f"{stored}_shexp": name for stored, name in GATED.items()})
NAMES: Final = {
    **MLP,
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
    **SHARED_EXPERTS,
}
DRAFTING: Final = "nextn_predict_layers"
DRAFT: Final = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
GROUPED: Final = {
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
KEYS: Final = {
    **GROUPED,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
CHECKED: Final = (
    "attention.head_count_kv",
    "attention.value_length",
    "attention.key_length_mla",
    "expert_gating_func",
    "expert_weights_norm",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


def configure_latent(header: Header, *, least_rotated: int = 1) -> None:
    """Complete the configuration with the fields of latent attention, which metadata gives as sizes of keys, of which
    at least `least_rotated` entries are rotated. Raises ModelError for sizes that contradict each other."""
    own, config = header.own, header.config
    rotated = header.whole("rope.dimension_count", least=least_rotated)
    key, rank = map(header.whole, ("attention.key_length_mla", "attention.kv_lora_rank"))
    if own.get("attention.key_length", rank + rotated) != rank + rotated:
        raise header.wrong(f"{brief(own['attention.key_length'])} entries of a key, not {rank} and {rotated}")
    config |= {
        "q_lora_rank": config.get("q_lora_rank"),  # a null, which is not an absence, for none
        "qk_nope_head_dim": key - rotated,
        "num_key_value_heads": None,
        "head_dim": None,
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "attention_bias": header.has("attn_kv_a_mqa.bias"),
    }


def yarn_amplitude(header: Header) -> None:
    """Add YaRN's amplitude to the rope's scaling. Raises ModelError if the file does not say it."""
    scaling = header.config["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        return
    multiplier = header.own.get("rope.scaling.yarn_log_multiplier")
    if not isinstance(multiplier, float) or multiplier <= 0:
        raise header.wrong(f"a yarn_log_multiplier of {brief(multiplier)}: the rope's amplitude is ambiguous")
    # It is a tenth of mscale_all_dim, in single precision; that mscale is the same is what llama.cpp takes for granted.
    scaling["mscale"] = scaling["mscale_all_dim"] = round(multiplier / 0.1, 6)
    header.yarn_options()


def leave_out_draft(header: Header) -> None:
    """Subtract the draft blocks from the number of layers. Raises ModelError if no layer remains, and if the first
    draft block has no `nextn` weights: it is a layer of the model."""
    blocks, drafting = len(header.layers), header.own.get(DRAFTING, 0)
    if type(drafting) is not int or not 0 <= drafting < blocks:
        raise header.wrong(f"{DRAFTING} is {brief(drafting)} of {blocks} blocks")
    first = f"blk.{blocks - drafting}.nextn."
    if drafting and not any(name.startswith(first) for name in header.file.tensors):
        raise header.wrong(f"{DRAFTING} is {drafting}, and block {blocks - drafting} has no nextn weights")
    header.config["num_hidden_layers"] = blocks - drafting


def without_draft(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Return the tensors without those of blocks behind the model's own."""
    layers = {name: name.removeprefix("model.layers.").partition(".")[0] for name in tensors}
    behind = {name for name, layer in layers.items() if layer.isdecimal() and int(layer) >= config.num_layers}
    return {name: tensor for name, tensor in tensors.items() if name not in behind}


def restore_latent(tensors: Tensors) -> Tensors:
    """Split the weight that makes keys of latent vectors from the one that makes values, and stored with inputs before
    outputs."""
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
