"""Settings of other engines that this version does not have: one honest line each instead of a guess.

Names are keys (underscores, no dashes); a trailing `*` stands for any ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_ONE_MACHINE: Final = "a model runs on one machine, on its CPU or one GPU; use several servers behind a balancer"
_OWN_CODE: Final = "code in checkpoints is never run; the models that are served are built in"
_STORED: Final = "a checkpoint is read as it is stored (GGUF Q4_1, safetensors, ...) and computed in --dtype"
_CACHE_TYPE: Final = "keys and values have one type: --kv-cache-dtype"
_NO_SPECULATION: Final = "speculative decoding is not in this version"
_NO_DISAGGREGATION: Final = "prefill and decode share one server in this version"
_METRICS: Final = "metrics are always on, at /metrics: leave it out"
_PREFIX_CACHE: Final = "the prefix cache is on unless --disable-radix-cache: leave it out"
_CHUNKED: Final = "prompts are always computed in chunks, of --chunked-prefill-size: leave it out"
_SIZES_OF_GRAPHS: Final = "batch sizes to capture are chosen up to --cuda-graph-max-bs: set that"
_NO_GPU: Final = "a model computes whole on --device cpu or cuda: leave it out"
_NO_LORA: Final = "adapters (LoRA) are not in this version"
_PLACES: Final = "states are kept where conversations go on, and every --anchor-interval tokens of a long prompt"
_ONE_POOL: Final = "all states share one pool, of --max-mamba-cache-size slots"
_SEPARATE_POOLS: Final = "KV, windows and states have pools of their own: --mamba-full-memory-ratio divides the memory"

ABSENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tensor_parallel_size": _ONE_MACHINE,
        "tp_size": _ONE_MACHINE,
        "tp": _ONE_MACHINE,
        "pipeline_parallel_size": _ONE_MACHINE,
        "pp_size": _ONE_MACHINE,
        "data_parallel_size": _ONE_MACHINE,
        "dp_size": _ONE_MACHINE,
        "enable_expert_parallel": _ONE_MACHINE,
        "ep_size": _ONE_MACHINE,
        "nnodes": _ONE_MACHINE,
        "node_rank": _ONE_MACHINE,
        "trust_remote_code": _OWN_CODE,
        "load_format": _STORED,
        "cache_type_k": _CACHE_TYPE,
        "cache_type_v": _CACHE_TYPE,
        "speculative_*": _NO_SPECULATION,
        "draft_*": _NO_SPECULATION,
        "model_draft": _NO_SPECULATION,
        "disaggregation_*": _NO_DISAGGREGATION,
        "kv_transfer_config": _NO_DISAGGREGATION,
        "enable_metrics": _METRICS,
        "metrics": _METRICS,
        "enable_prefix_caching": _PREFIX_CACHE,
        "cache_prompt": _PREFIX_CACHE,
        "enable_chunked_prefill": _CHUNKED,
        "cuda_graph_*": _SIZES_OF_GRAPHS,
        "cudagraph_capture_sizes": _SIZES_OF_GRAPHS,
        "n_gpu_layers": _NO_GPU,
        "gpu_layers": _NO_GPU,
        "ngl": _NO_GPU,
        "attention_backend": "attention is part of --kernels",
        "flash_attn": "attention is part of --kernels",
        "enable_lora": _NO_LORA,
        "lora_*": _NO_LORA,
        "lora": _NO_LORA,
        "swap_space": "use --retraction-host-bytes with a size such as 4GiB",
        "cpu_offload_gb": "weights stay where the model computes",
        "cache_ram": "prefixes are cached where the model computes: --kv-cache-bytes",
        "mamba_cache_mode": "use --mamba-scheduler-strategy",
        "mamba_cache_dtype": "convolution states have the type of --dtype, scans' that of --mamba-ssm-dtype",
        "mamba_block_size": _PLACES,
        "prefix_cache_retention_interval": _PLACES,
        "checkpoint_min_step": _PLACES,
        "ctx_checkpoints": _ONE_POOL,
        "mamba_max_states_per_path": _ONE_POOL,
        "enable_int8_mamba_checkpoint": "a cached state has the type of a live one: --mamba-ssm-dtype",
        "enable_unified_memory": _SEPARATE_POOLS,
        "disable_hybrid_swa_memory": _SEPARATE_POOLS,
        "disable_hybrid_kv_cache_manager": _SEPARATE_POOLS,
        "swa_full": _SEPARATE_POOLS,
    }
)

# Values of --dtype that the field knows.
ABSENT_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        ("float16", "half", "fp16"),
        "float16 is not computed in by this version's kernels: use bfloat16, or float32 for more precision",
    )
)

# Values of --kv-cache-dtype that the field knows.
ABSENT_KV_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **ABSENT_DTYPES,
        **dict.fromkeys(
            ("fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"),
            "8-bit keys and values are integers with a scale per token and head here: use int8",
        ),
    }
)

# Values of --quantization that the field knows.
_WRONG_CODES: Final = (
    "weights in these codes are not read by this version: give the checkpoint in bfloat16 and use int8 or int4"
)
ABSENT_QUANTIZATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gguf": "a GGUF file's own codes are kept where that loses nothing: use file, or leave it out",
        "mxfp4": "a checkpoint's MXFP4 weights are read, and computed in --dtype: leave it out",
        **dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes"), _WRONG_CODES
        ),
        **dict.fromkeys(("fp8", "modelopt", "modelopt_fp8", "modelopt_fp4", "w8a8_fp8"), _WRONG_CODES),
        **dict.fromkeys(("w8a8_int8", "q8_0"), "use int8: groups of 32 weights with a scale each"),
        **dict.fromkeys(("q4_0", "q4_1"), "use int4: groups of 32 weights with a scale and a minimum each"),
    }
)

# Values of --mamba-scheduler-strategy that the field knows.
ABSENT_STRATEGIES: Final[Mapping[str, str]] = MappingProxyType(
    {"extra_buffer_lazy": "tracking slots are part of what a request is admitted with: use extra_buffer"}
)


def why_absent(spelling: str) -> str:
    """The line about a flag, variable or key that the field has and this version has not; empty for all others.

    `spelling` is as written: `--tp-size`, `tp_size`.
    """
    key = as_key(spelling)
    return ABSENT.get(key) or next(
        (line for name, line in ABSENT.items() if name.endswith("*") and key.startswith(name[:-1])), ""
    )


def as_key(option: str) -> str:
    """`--max-model-len` -> `max_model_len`."""
    return option.lstrip("-").replace("-", "_").lower()
