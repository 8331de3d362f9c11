"""Settings of other engines that this version does not have: one honest line each instead of a guess.

Names are keys (underscores, no dashes); a trailing `*` stands for any ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _by_name(names: Mapping[str, str]) -> MappingProxyType[str, str]:
    """Of lines and the names that each is about, each name's line."""
    return MappingProxyType({name: line for line, of in names.items() for name in of.split()})


ABSENT: Final = _by_name(
    {
        "a model runs on one machine, on its CPU or one GPU; use several servers behind a balancer": (
            "tensor_parallel_size tp_size tp pipeline_parallel_size pp_size data_parallel_size dp_size "
            "enable_expert_parallel ep_size nnodes node_rank"
        ),
        "code in checkpoints is never run; the models that are served are built in": "trust_remote_code",
        "a checkpoint is read as it is stored (GGUF Q4_1, safetensors, ...) and computed in --dtype": "load_format",
        "keys and values have one type: --kv-cache-dtype": "cache_type_k cache_type_v",
        "guesses are accepted exactly where the ordinary sampler draws them: sampled tokens are the same as without, "
        "and as many are accepted: leave it out": (
            "speculative_use_rejection_sampling speculative_accept_threshold_single speculative_accept_threshold_acc "
            "draft_p_min draft_p_split spec_draft_p_min"
        ),
        "matches of any length are used, each for as many tokens as it has: set --speculative-ngram-max-trie-depth": (
            "speculative_ngram_* spec_ngram_* ngram_prompt_lookup_max ngram_prompt_lookup_min draft_min "
            "spec_draft_n_min"
        ),
        "widths follow from what pays with --speculative-algorithm auto": (
            "speculative_adaptive* speculative_disable_by_batch_size"
        ),
        "use --speculative-algorithm and --speculative-num-draft-tokens": "speculative_config spec_* lookup_cache_*",
        "the draft model has the device, types, quantization and kernels of the model": (
            "speculative_draft_* draft_* ctx_size_draft gpu_layers_draft threads_draft device_draft"
        ),
        "speculation is set by --speculative-algorithm, -num-draft-tokens, -draft-model-path and the -ngram- ones": (
            "speculative_*"
        ),
        "prefill and decode servers are set by --disaggregation-mode, -transfer-backend and -bootstrap-port, or --pd": (
            "disaggregation_* kv_transfer_config enable_pd_role_switch"
        ),
        "use --sampling-defaults model or openai; a request says anything else": (
            "generation_config override_generation_config preferred_sampling_params"
        ),
        "metrics are always on, at /metrics: leave it out": "enable_metrics metrics",
        "the prefix cache is on unless --disable-radix-cache: leave it out": "enable_prefix_caching cache_prompt",
        "prompts are always computed in chunks, of --chunked-prefill-size: leave it out": "enable_chunked_prefill",
        "batch sizes to capture are chosen up to --cuda-graph-max-bs: set that": "cuda_graph_* cudagraph_capture_sizes",
        "a model computes whole on --device cpu or cuda: leave it out": "n_gpu_layers gpu_layers ngl",
        "attention is part of --kernels": "attention_backend flash_attn",
        "tools are taken by every model whose calls can be read: set --tool-call-parser where that is not found": (
            "enable_auto_tool_choice tool_server"
        ),
        "a ratio means two things elsewhere: lengths are drawn evenly from --random-input-len to --random-input-max": (
            "random_range_ratio"
        ),
        "adapters (LoRA) are not in this version": "enable_lora lora_* lora",
        "use --retraction-host-bytes with a size such as 4GiB": "swap_space",
        "weights stay where the model computes": "cpu_offload_gb",
        "prefixes are cached where the model computes: --kv-cache-bytes": "cache_ram",
        "use --mamba-scheduler-strategy": "mamba_cache_mode",
        "convolution states have the type of --dtype, scans' that of --mamba-ssm-dtype": "mamba_cache_dtype",
        "states are kept where conversations go on, and every --anchor-interval tokens of a long prompt": (
            "mamba_block_size prefix_cache_retention_interval checkpoint_min_step"
        ),
        "all states share one pool, of --max-mamba-cache-size slots": "ctx_checkpoints mamba_max_states_per_path",
        "a cached state has the type of a live one: --mamba-ssm-dtype": "enable_int8_mamba_checkpoint",
        "KV, windows and states have pools of their own: --mamba-full-memory-ratio divides the memory": (
            "enable_unified_memory disable_hybrid_swa_memory disable_hybrid_kv_cache_manager swa_full"
        ),
    }
)
# Values of --speculative-algorithm that the field knows.
ABSENT_ALGORITHMS: Final = _by_name(
    {
        "heads that guess a block of tokens at once are not in this version: use NGRAM, or NEXTN if there is a head": (
            "DFLASH DSPARK"
        ),
        "guessing with an adapter of the model itself is not in this version, which has none: use NGRAM": "UNO",
    }
)
# Values of --dtype that the field knows.
ABSENT_DTYPES: Final = _by_name(
    {
        "float16 is not computed in by this version's kernels: use bfloat16, or float32 for more precision": (
            "float16 half fp16"
        ),
    }
)
# Values of --kv-cache-dtype that the field knows.
ABSENT_KV_DTYPES: Final = ABSENT_DTYPES | _by_name(
    {
        "8-bit keys and values are integers with a scale per token and head here: use int8": (
            "fp8 fp8_e4m3 fp8_e5m2 q8_0"
        ),
    }
)
# Values of --quantization that the field knows.
ABSENT_QUANTIZATIONS: Final = _by_name(
    {
        "a GGUF file's own codes are kept where that loses nothing: use file, or leave it out": "gguf",
        "a checkpoint's own codes are found by its config.json and kept: use file, or leave it out": (
            "awq awq_marlin gptq gptq_marlin compressed-tensors"
        ),
        "a checkpoint's MXFP4 weights are read, and computed in --dtype: leave it out": "mxfp4",
        "weights in these codes are not read by this version: give the checkpoint in bfloat16 and use int8 or int4": (
            "bitsandbytes fp8 modelopt modelopt_fp8 modelopt_fp4 w8a8_fp8"
        ),
        "use int8: groups of 32 weights with a scale each": "w8a8_int8 q8_0",
        "use int4: groups of 32 weights with a scale and a minimum each": "q4_0 q4_1",
    }
)
# Values of --mamba-scheduler-strategy that the field knows.
ABSENT_STRATEGIES: Final = _by_name(
    {
        "tracking slots are part of what a request is admitted with, in any --disaggregation-mode: use extra_buffer": (
            "extra_buffer_lazy"
        ),
    }
)


def why_absent(spelling: str) -> str:
    """The line about a flag, variable or key that the field has and this version has not; empty for all others.

    `spelling` is as it was written, with dashes or underscores.
    """
    key = as_key(spelling)
    return ABSENT.get(key) or next(
        (line for name, line in ABSENT.items() if name.endswith("*") and key.startswith(name[:-1])), ""
    )


def as_key(option: str) -> str:
    """`--max-model-len` -> `max_model_len`."""
    return option.lstrip("-").replace("-", "_").lower()
