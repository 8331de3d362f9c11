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
    "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "deepstack_visual_indexes": [5, 11, 17]},
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

# Sizes of both as in google-ai-edge/ai-edge-torch, ai_edge_torch/generative/examples/gemma3n.
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

# As in onnxruntime/mobius, src/mobius/models/granite_swa_test.py.
GRANITE_SWASH_2B: Final[dict[str, Any]] = {
    "model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"], "vocab_size": 100352, "hidden_size": 2560,
    "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True, "initializer_range": 0.1, "bos_token_id": 100257,
    "eos_token_id": 100257, "pad_token_id": 100256, "sliding_window": 128,
    "layer_types": ["full_attention" if i == 0 or i % 4 == 0 else "sliding_attention" for i in range(24)],
    "embedding_multiplier": 12, "residual_multiplier": 0.28, "logits_scaling": 10, "attention_multiplier": 0.0078125,
    "rope_theta": 10000,
}  # fmt: skip

# As in pierre427/mlx2, src/mlx2/adapters/granite_swa.py.
GRANITE_SWASH_3B_A600M: Final[dict[str, Any]] = {
    "model_type": "granitemoe_swa", "architectures": ["GraniteMoeSWAForCausalLM"], "vocab_size": 100352,
    "hidden_size": 1280, "intermediate_size": 512, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "num_local_experts": 48, "num_experts_per_tok": 4, "shared_intermediate_size": 1280,
    "sliding_window": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True, "embedding_multiplier": 12,
    "attention_multiplier": 0.015625, "residual_multiplier": 0.26, "logits_scaling": 5,
    "layer_types": ["full_attention" if i in (0, *range(3, 28, 4)) else "sliding_attention" for i in range(28)],
}  # fmt: skip

# Sizes as transformers' configuration class has them by default, but for the pools; names of fields and layers as in
# the tests of jundot/omlx for the multi-token layer of glm5_next.
GLM_5_3_FLASH: Final[dict[str, Any]] = {
    "model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {
        "model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "num_hidden_layers": 45, "num_nextn_predict_layers": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1, "n_routed_experts": 288,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32",
        "first_k_dense_replace": 3, "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 42], "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256, "head_dim": 0,
        "mla_use_nope": True, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "index_kpool": 4,
        "index_kpool_compress": True, "index_kpool_always_select_tail": True, "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True, "swiglu_limit": 10.0, "mhc": True, "hc_mult": 4, "hc_eps": 1e-06,
        "hc_sinkhorn_iters": 20, "hidden_act": "silu", "rms_norm_eps": 1e-05, "attention_bias": False,
        "max_position_embeddings": 1048576, "tie_word_embeddings": False,
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i % 4 != 3], "full_attn_layers": [*range(3, 45, 4)],
        },
    },
}  # fmt: skip

# As in steadfastgaze/MoEspresso, the tests of its runtime for qwen4.
QWEN_3_8_FLASH_NEXT: Final[dict[str, Any]] = {
    "model_type": "qwen4_exp", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen4_exp_text", "dtype": "bfloat16", "vocab_size": 248320, "max_position_embeddings": 262144,
        "hidden_size": 2560, "num_hidden_layers": 48, "hidden_act": "silu", "hc_count": 4, "hc_lowrank": 320,
        "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 2, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "ngram_size": 3,
        "heads_per_ngram": 8, "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ple_layer_ids": [2],
        "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128,
        "seed": 1234, "eos_token_id": 248044, "rms_norm_eps": 1e-6, "output_gate_type": "sigmoid",
        "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
        "layer_types": ["qwen_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
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
    "moonshotai/Kimi-K2.5": (KIMI_K2_5, 1026.0),
    "LiquidAI/LFM2-VL-1.6B": (LFM2_VL_1_6B, 1.17),
    "mistralai/Mistral-Small-4-119B-2603": (MISTRAL_SMALL_4_119B, 119.0),
    "meta-models/Muse-Glimmer-30B": (MUSE_GLIMMER_30B, 30.0 - 1.92),  # without encoder and adapter
    "google/gemma-4-12B": (GEMMA_4_12B, 11.95 - 0.04),  # without the embedders of pictures and sounds
    "google/gemma-3n-E4B": (GEMMA_3N_E4B, 6.87),  # as llama.cpp counts files of the language model, and the next
    "google/gemma-3n-E2B": (GEMMA_3N_E2B, 4.46),
    "ibm-granite/granite-swash-2b": (GRANITE_SWASH_2B, 2.144),
    "ibm-granite/granite-swash-3b-a600m": (GRANITE_SWASH_3B_A600M, 3.02),
    "zai-org/GLM-5.3-Flash": (GLM_5_3_FLASH, 321.0 - 7.4),  # without the layer that drafts
    "Qwen/Qwen3.8-Flash-Next": (QWEN_3_8_FLASH_NEXT, 125.0 + 51.0),  # the latter in tables of n-grams
    "JetBrains/Mellum2-12B-A2.5B-Base": (MELLUM2_12B_A2_5B, 12.1),
}
"""Repositories: fields, and the published number of parameters of the language model in billions."""
