"""A small configuration of each model type, in a config.json's fields: for random models to try things with.

Widths follow from the hidden size, kinds of layers from their number; every part that a type can have is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from forebay.base.errors import ConfigError

DEFAULT_HIDDEN_SIZE: Final = 128
DEFAULT_NUM_LAYERS: Final = 4
_MAX_POSITIONS: Final = 32_768
_WINDOW: Final = 128
_WIDE: Final = 512  # from here on heads have 64 dimensions, below 32


class Shape(NamedTuple):
    hidden_size: int
    num_layers: int

    @property
    def head_dim(self) -> int:
        return 64 if self.hidden_size >= _WIDE else 32

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads if self.num_heads % 2 else self.num_heads // 2

    def cycle(self, *kinds: str) -> list[str]:
        """One of the kinds for each layer, in turn."""
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]


def small_config(model_type: str, *, hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """ConfigError for a type that there is none of, and a hidden size that does not divide into heads."""
    if model_type not in _OWN:
        raise ConfigError(f"there is no small model like {model_type!r}; there are {', '.join(sorted(_OWN))}")
    shape = Shape(hidden_size, num_layers)
    if hidden_size % shape.head_dim or hidden_size <= 0:
        raise ConfigError(f"a hidden size of {hidden_size} does not divide into heads of {shape.head_dim}")
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": True,
        **_OWN[model_type](shape),
    }


def _nothing(shape: Shape) -> dict[str, Any]:
    return {}


def _experts(shape: Shape) -> dict[str, Any]:
    return {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": shape.hidden_size}


def _mamba2(shape: Shape) -> dict[str, Any]:
    """As Bamba and those after it name a Mamba-2 mixer's fields."""
    return {
        "mamba_n_heads": 2 * shape.num_heads,
        "mamba_d_head": shape.head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


def _falcon_h1(shape: Shape) -> dict[str, Any]:
    return {**_mamba2(shape), "mamba_d_ssm": 2 * shape.hidden_size}


def _granitemoehybrid(shape: Shape) -> dict[str, Any]:
    return {
        **_mamba2(shape),
        "layer_types": shape.cycle("mamba", "mamba", "attention", "mamba"),
        "intermediate_size": shape.hidden_size,
        "shared_intermediate_size": 2 * shape.hidden_size,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "position_embedding_type": "nope",
    }


def _bamba(shape: Shape) -> dict[str, Any]:
    return {**_mamba2(shape), "attn_layer_indices": list(range(2, shape.num_layers, 4))}


def _nemotron_h(shape: Shape) -> dict[str, Any]:
    return {
        "layers_block_type": shape.cycle("mamba", "mlp", "attention", "moe"),
        "mamba_num_heads": 2 * shape.num_heads,
        "mamba_head_dim": shape.head_dim,
        "n_groups": 1,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.hidden_size,
        "moe_shared_expert_intermediate_size": shape.hidden_size,
    }


def _zamba2(shape: Shape) -> dict[str, Any]:
    return {
        "layers_block_type": shape.cycle("mamba", "mamba", "hybrid"),
        "n_mamba_heads": 2 * shape.num_heads,
        "mamba_headdim": shape.head_dim,
        "mamba_ngroups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "adapter_rank": 16,
        "attention_head_dim": 2 * shape.head_dim,
        "num_key_value_heads": shape.num_heads,
    }


def _jamba(shape: Shape) -> dict[str, Any]:
    return {
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    }


def _mamba(shape: Shape) -> dict[str, Any]:
    return {"state_size": 16, "expand": 2, "intermediate_size": 2 * shape.hidden_size}


def _mamba2_alone(shape: Shape) -> dict[str, Any]:
    return {"num_heads": 2 * shape.num_heads, "state_size": 64, "n_groups": 1, "expand": 2}


def _delta_net(shape: Shape) -> dict[str, Any]:
    return {
        "layer_types": shape.cycle(*["linear_attention"] * 3, "full_attention"),
        "linear_num_key_heads": shape.num_heads,
        "linear_num_value_heads": 2 * shape.num_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
    }


def _delta_net_with_experts(shape: Shape) -> dict[str, Any]:
    return {**_delta_net(shape), **_experts(shape), "shared_expert_intermediate_size": shape.hidden_size}


def _latent(shape: Shape) -> dict[str, Any]:
    """Multi-head latent attention, and experts behind the first layer."""
    return {
        "q_lora_rank": 2 * shape.head_dim,
        "kv_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "head_dim": 16,
        "num_key_value_heads": shape.num_heads,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": shape.hidden_size,
    }


def _deepseek_v3(shape: Shape) -> dict[str, Any]:
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    return {**_latent(shape), **routing}


def _olmo_hybrid(shape: Shape) -> dict[str, Any]:
    return {**_delta_net(shape), "linear_num_value_heads": shape.num_heads}


def _kimi_linear(shape: Shape) -> dict[str, Any]:
    return {
        **_latent(shape),
        "layer_types": shape.cycle(*["linear_attention"] * 3, "full_attention"),
        "linear_num_heads": shape.num_heads,
        "linear_head_dim": shape.head_dim,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
    }


def _bailing_hybrid(shape: Shape) -> dict[str, Any]:
    return {
        **_latent(shape),
        "head_dim": shape.head_dim,
        "layer_types": shape.cycle(*["linear_attention"] * 3, "full_attention"),
        "num_experts": 8,
        "num_experts_per_token": 2,
        "n_group": 2,
        "topk_group": 1,
        "tie_word_embeddings": False,
    }


def _lfm2(shape: Shape) -> dict[str, Any]:
    return {"layer_types": shape.cycle("conv", "conv", "full_attention"), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(shape: Shape) -> dict[str, Any]:
    return {
        **_experts(shape),
        "layer_types": shape.cycle("conv", "conv", "full_attention"),
        "num_dense_layers": 1,
    }


def _lfm3(shape: Shape) -> dict[str, Any]:
    return {"layer_types": shape.cycle("conv", "sliding_attention", "full_attention"), "sliding_window": _WINDOW}


def _gemma3_text(shape: Shape) -> dict[str, Any]:
    return {
        "layer_types": shape.cycle("sliding_attention", "sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": shape.head_dim,
    }


def _gpt_oss(shape: Shape) -> dict[str, Any]:
    return {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": shape.hidden_size,
        "layer_types": shape.cycle("sliding_attention", "full_attention"),
        "sliding_window": _WINDOW,
    }


_OWN: Final[dict[str, Callable[[Shape], dict[str, Any]]]] = {
    "llama": _nothing,
    "mistral": lambda shape: {"sliding_window": _WINDOW},
    "qwen2": _nothing,
    "qwen3": _nothing,
    "smollm3": _nothing,
    "olmo2": _nothing,
    "qwen3_moe": _experts,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "bamba": _bamba,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2_alone,
    "falcon_mamba": _mamba,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "qwen3_next": _delta_net_with_experts,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net_with_experts,
    "olmo_hybrid": _olmo_hybrid,
    "deepseek_v3": _deepseek_v3,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "gemma3_text": _gemma3_text,
    "gpt_oss": _gpt_oss,
}
SMALL_TYPES: Final = tuple(_OWN)
