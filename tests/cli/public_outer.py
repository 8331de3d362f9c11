"""Published configurations of models with a language model inside, and of Ministral 3 and Mellum, as facts; see
`test_published_counts.py`. Of most, what describes images is left out."""

from __future__ import annotations

from typing import Any, Final

_MROPE: Final[dict[str, Any]] = {"type": "mrope", "mrope_section": [16, 24, 24]}

_QWEN2_5_VISION: Final[dict[str, Any]] = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip

QWEN2_5_VL_3B: Final[dict[str, Any]] = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000,
    "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vision_config": _QWEN2_5_VISION,
    "rope_scaling": _MROPE, "vocab_size": 151936,
}  # fmt: skip

QWEN2_5_VL_7B: Final[dict[str, Any]] = {
    **QWEN2_5_VL_3B, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "vision_config": {**_QWEN2_5_VISION, "out_hidden_size": 3584}, "vocab_size": 152064,
}  # fmt: skip

QWEN2_VL_7B: Final[dict[str, Any]] = {
    **QWEN2_5_VL_7B, "model_type": "qwen2_vl", "max_position_embeddings": 32768,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
}  # fmt: skip

_QWEN3_VL: Final[dict[str, Any]] = {
    "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 262144, "num_attention_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 5_000_000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "vocab_size": 151936,
}  # fmt: skip

QWEN3_VL_4B: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": True, "vision_config": {"depth": 24},
    "text_config": {
        **_QWEN3_VL, "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip

QWEN3_VL_30B_A3B: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl_moe", "image_token_id": 151655, "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
    "text_config": {
        **_QWEN3_VL, "model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    },
}  # fmt: skip

LLAVA_1_5_7B: Final[dict[str, Any]] = {
    "model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu",
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32064, "vision_config": {"hidden_size": 1024},
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
    },
}  # fmt: skip

INTERNVL3_8B: Final[dict[str, Any]] = {
    "model_type": "internvl", "image_token_id": 151667, "downsample_ratio": 0.5, "vision_config": {"hidden_size": 1024},
    "text_config": {
        "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 70,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1e6,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151674,
    },
}  # fmt: skip

MISTRAL_SMALL_3_1_24B: Final[dict[str, Any]] = {
    "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False, "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "mistral", "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9,
        "sliding_window": None, "vocab_size": 131072,
    },
}  # fmt: skip

MINISTRAL_3_3B: Final[dict[str, Any]] = {
    "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False, "spatial_merge_size": 2,
    "dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "ministral3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 9216, "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None,
        "tie_word_embeddings": True, "vocab_size": 131072,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6, "rope_type": "yarn",
            "type": "yarn",
        },
    },
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
}  # fmt: skip

KIMI_K2: Final[dict[str, Any]] = {
    "model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001, "attention_bias": False, "bos_token_id": 163584, "eos_token_id": 163585,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip

_MOON_VIT: Final[dict[str, Any]] = {
    "_attn_implementation": "flash_attention_2", "init_pos_emb_height": 64, "init_pos_emb_time": 4,
    "init_pos_emb_width": 64, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger", "patch_size": 14, "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip

KIMI_K2_5: Final[dict[str, Any]] = {
    "model_type": "kimi_k25", "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "pad_token_id": 163839, "tie_word_embeddings": False, "text_config": KIMI_K2, "vision_config": _MOON_VIT,
}  # fmt: skip

LFM2_VL_1_6B: Final[dict[str, Any]] = {
    "model_type": "lfm2_vl", "downsample_factor": 2, "image_token_id": 396, "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip2_vision_model"},
    "text_config": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1e6, "use_pos_enc": True, "vocab_size": 65536,
    },
}  # fmt: skip

# As transformers' configuration class has it by default, with three windows in four layers.
MELLUM2_12B_A2_5B: Final[dict[str, Any]] = {
    "model_type": "mellum", "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168,
    "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 1024, "moe_intermediate_size": 896,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 7,
}  # fmt: skip

# As transformers' configuration class has it by default.
MISTRAL_SMALL_4_119B: Final[dict[str, Any]] = {
    "model_type": "mistral4", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32,
    "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": True, "rope_interleave": True,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip

# As transformers' configuration classes have them by default.
MUSE_GLIMMER_30B: Final[dict[str, Any]] = {
    "model_type": "muse_glimmer", "image_token_id": 200092, "vision_config": {"num_hidden_layers": 50},
    "text_config": {
        "model_type": "muse_glimmer_text", "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968,
        "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": 2048,
        "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
    },
}  # fmt: skip

GEMMA_4_12B: Final[dict[str, Any]] = {
    "model_type": "gemma4_unified", "image_token_id": 258880, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
        "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    "vision_config": {"mm_embed_dim": 3840, "mm_posemb_size": 1120, "output_proj_dims": 3840},
}  # fmt: skip

GEMMA_3N_E4B: Final[dict[str, Any]] = {
    "model_type": "gemma3n", "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma3n_text", "vocab_size": 262400, "vocab_size_per_layer_input": 262144, "hidden_size": 2048,
        "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip

GEMMA_3N_E2B: Final[dict[str, Any]] = {
    **GEMMA_3N_E4B,
    "text_config": {
        **GEMMA_3N_E4B["text_config"], "intermediate_size": 8192, "num_hidden_layers": 30, "num_kv_shared_layers": 10,
    },
}  # fmt: skip

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": (QWEN2_5_VL_3B, 3.09),  # of Qwen2.5-3B, as the text of the others
    "Qwen/Qwen2.5-VL-7B-Instruct": (QWEN2_5_VL_7B, 7.62),
    "Qwen/Qwen2-VL-7B-Instruct": (QWEN2_VL_7B, 7.62),
    "Qwen/Qwen3-VL-4B-Instruct": (QWEN3_VL_4B, 4.02),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (QWEN3_VL_30B_A3B, 30.53),
    "llava-hf/llava-1.5-7b-hf": (LLAVA_1_5_7B, 6.74),
    "OpenGVLab/InternVL3-8B-hf": (INTERNVL3_8B, 7.62),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (MISTRAL_SMALL_3_1_24B, 23.57),
    "mistralai/Ministral-3-3B-Instruct-2512": (MINISTRAL_3_3B, 3.43),
    "moonshotai/Kimi-K2-Instruct": (KIMI_K2, 1026.0),
    "moonshotai/Kimi-K2.5": (KIMI_K2_5, 1026.0 + 0.47),
    "LiquidAI/LFM2-VL-1.6B": (LFM2_VL_1_6B, 1.17),
    "mistralai/Mistral-Small-4-119B-2603": (MISTRAL_SMALL_4_119B, 119.0),
    "meta-models/Muse-Glimmer-30B": (MUSE_GLIMMER_30B, 30.0),
    "google/gemma-4-12B": (GEMMA_4_12B, 11.95 - 0.04),  # without the embedders of pictures and sounds
    "google/gemma-3n-E4B": (GEMMA_3N_E4B, 6.87),  # as llama.cpp counts files of the language model, as the next
    "google/gemma-3n-E2B": (GEMMA_3N_E2B, 4.46),
    "JetBrains/Mellum2-12B-A2.5B-Base": (MELLUM2_12B_A2_5B, 12.1),
}
"""Repositories: fields, and the published number of parameters of the language model in billions."""
