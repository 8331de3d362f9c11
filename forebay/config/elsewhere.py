"""Settings of other engines that this version does not have, each with the line that a user reads about it.

`ACCEPTED` holds the options that a command line may keep because they change nothing here. `ABSENT` holds the settings
that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Accepted:
    """An option that is accepted and changes nothing. `values` are the accepted ones, any value if the tuple is
    empty."""

    option: str
    line: str
    takes_value: bool = False
    optional: bool = False
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, written: str, line: str) -> Accepted:
        """Read one entry of `ACCEPTED`: `--a`, `--a=*` (any value), `--a=1|2` (these), or `--a=[on|off]` (or none)."""
        option, equals, values = written.partition("=")
        inner = values.strip("[]")
        chosen = () if inner in ("", "*") else tuple(inner.split("|"))
        return cls(option, line, takes_value=bool(equals), optional=values.startswith("["), values=chosen)

    def accepts(self, value: str | None) -> bool:
        """Return whether the flag may have this value; None stands for a flag without one, and case is ignored."""
        return value is None or not self.values or value.lower() in self.values


def _by_name(names: Mapping[str, str]) -> MappingProxyType[str, str]:
    """Return the line of each name, given lines and the names that each is about."""
    return MappingProxyType({name: line for line, of in names.items() for name in of.split()})


def _by_option(options: Mapping[str, str]) -> MappingProxyType[str, Accepted]:
    parsed = (Accepted.parse(written, line) for line, all_written in options.items() for written in all_written.split())
    return MappingProxyType({accepted.option: accepted for accepted in parsed})


ACCEPTED: Final = _by_option(
    {
        # Of llama-server.
        "chat templates are always rendered as Jinja": "--jinja",
        "attention is part of --kernels": (
            "-fa=[on|off|auto|0|1] --flash-attn=[on|off|auto|0|1] --attention-backend=* --mm-attention-backend=* "
            "--sampling-backend=* --prefill-attention-backend=* --decode-attention-backend=* "
            "--triton-attention-num-kv-splits=* --moe-runner-backend=* --disable-flashinfer"
        ),
        "a step is bounded by --chunked-prefill-size alone (also written --ubatch-size)": (
            "-b=* --batch-size=* --max-prefill-tokens=*"
        ),
        "--num-threads is for prompts and for decodes": "-tb=* --threads-batch=*",
        "the server computes on --num-threads, and reads requests on one thread": (
            "--threads-http=* --tokenizer-worker-num=* --api-server-count=1 --disable-frontend-multiprocessing"
        ),
        "a model computes whole on --device cpu or cuda": (
            "-ngl=* --gpu-layers=* --n-gpu-layers=* -sm=none --split-mode=none -mg=0 --main-gpu=0 --base-gpu-id=0 "
            "-kvo --kv-offload --op-offload --no-op-offload --no-host --cpu-offload-gb=0 --swap-space=0"
        ),
        "how files are read follows from what they hold, and no memory is locked": (
            "--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io --repack -nr --no-repack"
        ),
        "memory is divided so that the model fits": "-fit=on|1 --fit=on|1",
        "requests are always batched continuously": "-cb --cont-batching",
        "all requests share one KV cache, by pages": (
            "-kvu --kv-unified -dt=* --defrag-thold=* --swa-full -sps=* --slot-prompt-similarity=*"
        ),
        "no token is ever dropped from a context: a request ends where it is full": ("--no-context-shift --keep=*"),
        "an answer may fill the context, unless its request sets max_tokens": (
            "-n=-1|-2 --n-predict=-1|-2 --predict=-1|-2"
        ),
        "a model that is served embeds texts (/v1/embeddings), ranks them (/v1/rerank) and generates": (
            "--embedding --embeddings --rerank --reranking --is-embedding --task=auto|generate|embed|embedding "
            "--runner=auto|generate|pooling --convert=auto|none|embed"
        ),
        "GET /slots and GET /props are always there; they show no prompts, and settings cannot be posted": (
            "--slots --no-slots --props"
        ),
        "metrics are always at /metrics": (
            "--metrics --enable-metrics --disable-log-stats --enable-server-load-tracking --show-time-cost "
            "--decode-log-interval=*"
        ),
        "the console page is always at /": "--webui",
        "thinking is separate from the text; --reasoning-parser none leaves it in the text": (
            "--reasoning-format=auto|deepseek --reasoning=auto --reasoning-budget=-1 --enable-reasoning"
        ),
        "a request continues its last message if it sets continue_final_message": "--no-prefill-assistant",
        "the prefix cache is on unless --disable-radix-cache; its pages are where the model computes": (
            "--enable-prefix-caching --cache-prompt --cache-reuse=* -cram=* --cache-ram=*"
        ),
        "images are served if the checkpoint has an encoder; --limit-mm-per-prompt image=0 refuses them": (
            "--no-mmproj --no-mmproj-auto --no-mmproj-offload --mmproj-offload --language-model-only"
        ),
        "the engine warms up before it is ready": "--warmup --skip-server-warmup",
        "a log line is key=value, without colours": (
            "--log-colors=[on|off|auto|0|1] --log-prefix --log-timestamps --perf --no-perf"
        ),
        # Of vLLM and SGLang.
        "a model runs on one machine, on its CPU or one GPU; use several servers behind a balancer": (
            "-tp=1 --tp=1 --tp-size=1 --tensor-parallel-size=1 -pp=1 --pp-size=1 --pipeline-parallel-size=1 -dp=1 "
            "--dp-size=1 --data-parallel-size=1 --ep-size=1 --nnodes=1 --node-rank=0 "
            "--distributed-executor-backend=* --disable-custom-all-reduce --enable-p2p-check"
        ),
        "code in checkpoints is never run; the models that are served are built in": "--trust-remote-code",
        "a checkpoint is read as it is stored (GGUF Q4_1, safetensors, ...) and computed in --dtype": (
            "--load-format=auto|safetensors|gguf|hf --config-format=auto|hf --model-impl=auto|vllm|sglang "
            "--tokenizer-mode=auto|hf|slow"
        ),
        "a request without sampling values gets the model's own: --sampling-defaults model or openai": (
            "--generation-config=auto"
        ),
        "prompts are always computed in chunks, of --chunked-prefill-size": "--enable-chunked-prefill",
        "prompts and decodes share steps: --mixed-chunk-size": "--enable-mixed-chunk",
        "steps are planned ahead by --overlap-depth": (
            "--async-scheduling --num-scheduler-steps=* --num-continuous-decode-steps=* --use-v2-block-manager"
        ),
        "kernels are compiled before they are used; --cuda-graph-max-bs and --disable-cuda-graph are about graphs": (
            "--enable-torch-compile --torch-compile-max-bs=* --max-seq-len-to-capture=* --disable-cuda-graph-padding "
            "--calculate-kv-scales --disable-shared-experts-fusion --disable-chunked-prefix-cache"
        ),
        "a retracted request keeps its KV in --retraction-host-bytes, or is computed again": "--preemption-mode=*",
        "requests offer tools; --tool-call-parser is for a format that is not detected": (
            "--enable-auto-tool-choice --exclude-tools-when-tool-choice-none"
        ),
        "the form of messages is found in the chat template": "--chat-template-content-format=auto|string|openai",
        "grammars have one backend": ("--guided-decoding-backend=* --grammar-backend=* --structured-outputs-config=*"),
        "prompts are never logged": ("--disable-log-requests --no-enable-log-requests --max-log-len=*"),
        "an answer always has its request's id and the number of cached tokens": (
            "--enable-request-id-headers --enable-prompt-tokens-details --enable-cache-report"
        ),
        "a CPU's memory can always be given back (/sleep); a GPU's with --enable-memory-saver": "--enable-sleep-mode",
        "an answer's role is assistant": "--response-role=assistant",
        "each token is sent when it is known": "--stream-interval=1",
        "a token has up to 20 log-probabilities": "--max-logprobs=20",
    }
)
# Names are keys (underscores, no dashes); a trailing `*` stands for any ending.
ABSENT: Final = _by_name(
    {
        "a model runs on one machine, on its CPU or one GPU; use several servers behind a balancer": (
            "data_parallel_* enable_expert_parallel enable_dp_attention dist_init_addr headless"
        ),
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
        "use --speculative-algorithm and --speculative-num-draft-tokens": (
            "speculative_config spec_* lookup_cache_* lcs lcd"
        ),
        "the draft model has the device, types, quantization and kernels of the model": (
            "speculative_draft_* draft_* ctx_size_draft gpu_layers_draft threads_draft threads_batch_draft "
            "device_draft "
            "cache_type_k_draft cache_type_v_draft ctkd ctvd td tbd cd devd ngld cmoed ncmoed otd hfd hfrd "
            "hf_repo_draft"
        ),
        "speculation is set by --speculative-algorithm, -num-draft-tokens, -draft-model-path and the -ngram- ones": (
            "speculative_*"
        ),
        "prefill and decode servers are set by --disaggregation-mode, -transfer-backend and -bootstrap-port, or --pd": (
            "disaggregation_* kv_transfer_config enable_pd_role_switch"
        ),
        "use --sampling-defaults, --temperature, --top-k, --top-p, --min-p and the -penalty ones": (
            "override_generation_config preferred_sampling_params"
        ),
        "batch sizes to capture are chosen up to --cuda-graph-max-bs: set that": "cuda_graph_* cudagraph_capture_sizes",
        "a model computes whole on one device: --device cpu or cuda": (
            "ts tensor_split ot override_tensor cmoe cpu_moe ncmoe n_cpu_moe nkvo no_kv_offload dev fitt "
            "fit_target fitc "
            "fit_ctx list_devices"
        ),
        "threads stay where the system puts them: use taskset or numactl": (
            "numa prio prio_batch poll poll_batch cpu_mask cpu_range cpu_strict cr"
        ),
        "a ratio means two things elsewhere: lengths are drawn evenly from --random-input-len to --random-input-max": (
            "random_range_ratio"
        ),
        "control vectors are not in this version": "control_vector*",
        "adapters are loaded with --enable-lora and --lora-modules NAME=PATH": (
            "lora lora_scaled lora_init_without_apply"
        ),
        "an adapter is loaded from its folder, and as many stay as --max-loras says": "max_cpu_loras max_loaded_loras",
        "every layer that an adapter names is adapted": "lora_target_modules default_mm_loras",
        "no adapter is evicted: unload one": "lora_eviction_policy",
        "a model computes whole on one device, its adapters too": "fully_sharded_loras lora_backend lora_dtype",
        "prefixes are cached where the model computes: --kv-cache-bytes": "enable_hierarchical_cache hicache_*",
        # What a request says.
        "set max_tokens in the request": "n n_predict predict max_tokens",
        "set ignore_eos, logit_bias, stop, or skip_special_tokens in the request": (
            "ignore_eos l logit_bias r reverse_prompt sp special"
        ),
        "set response_format, or structured_outputs, in the request": (
            "grammar grammar_file j json_schema jf json_schema_file"
        ),
        "set enable_thinking, reasoning_effort, max_thinking_tokens, or chat_template_kwargs in the request": (
            "reasoning reasoning_budget reasoning_budget_message chat_template_kwargs default_chat_template_kwargs"
        ),
        "thinking is separate from the text; --reasoning-parser none leaves it in the text": "reasoning_format",
        "a request continues its last message if it sets continue_final_message": "prefill_assistant",
        "set stream_options in the request": "enable_force_include_usage stream_interval stream_output",
        "set logprobs and top_logprobs, up to 20, in the request": (
            "max_logprobs logprobs_mode return_tokens_as_token_ids"
        ),
        "this sampler is not in this version: use --temperature, --top-k, --top-p and --min-p": (
            "samplers sampling_seq sampler_seq typical typical_p tfs mirostat* dynatemp_* xtc_* dry_* top_nsigma "
            "top_n_sigma adaptive_* bs backend_sampling"
        ),
        "penalties are over all tokens: use --repetition-penalty, --presence-penalty and --frequency-penalty": (
            "repeat_last_n"
        ),
        "a request's tokens depend on its own seed: use --seed for requests without one": "random_seed",
        "prompts are never cut, and nothing is dropped from a context: --context-length": (
            "context_shift allow_auto_truncate ga_n ga_w gan gaw grp_attn_n grp_attn_w"
        ),
        "prompts come with requests": "p prompt f file e escape no_escape",
        "a request offers tools, and its client runs them": "tools tool_server agent",
        "requests are always batched continuously: use --max-running-requests 1 for one at a time": (
            "nocb no_cont_batching"
        ),
        "all requests share one KV cache, by pages": "no_kvu no_kv_unified",
        "the prefix cache keeps prompts; it writes none to files": "slot_save_path file_storage_path",
        "prompts are always computed in chunks: set --chunked-prefill-size": "no_enable_chunked_prefill",
        "images are cut as the checkpoint's processor says": "mm_processor_kwargs",
        "an encoder of images is a part of the model's checkpoint; audio is not served": (
            "mm mmproj mmu mmproj_url mmproj_auto mv model_vocoder tts_* image_* media_path enable_multimodal "
            "spm_infill"
        ),
        # What a model is.
        "chat templates are always rendered as Jinja; --chat-template names a file": "no_jinja completion_template",
        "calls and thinking are read unless --tool-call-parser none and --reasoning-parser none": "skip_chat_parsing",
        "name one file of a repository as org/name/FILE.gguf, or its codes as org/name:Q4_K_M": (
            "hff hf_file mu model_url dr docker_repo hfv hf_repo_v hffv hf_file_v"
        ),
        "one model is served: name it as org/name, or a file": (
            "models_dir models_preset models_max models_autoload no_models_autoload embd_* fim_* gpt_oss_* vision_*"
        ),
        "the hub's token is HF_TOKEN in the environment, its cache is HF_HUB_CACHE": "hft hf_token download_dir",
        "set HF_HUB_OFFLINE=1 in the environment: what is in the cache is served, and nothing is fetched": "offline",
        "this comes from the checkpoint's own files (config.json, the tokenizer's): change them": (
            "override_kv rope_* yarn_* hf_overrides json_model_override_args hf_config_path tokenizer tokenizer_path "
            "tokenizer_revision skip_tokenizer_init disable_sliding_window config_format tokenizer_mode code_revision"
        ),
        "a checkpoint is read as it is stored (GGUF Q4_1, safetensors, ...) and computed in --dtype": (
            "load_format model_impl check_tensors delete_ckpt_after_loading"
        ),
        "use --pooling; a model that is served generates and embeds": "override_pooler_config pooler_config",
        "use --quantization": "torchao_config quantization_param_path",
        "code of others is never loaded": (
            "middleware tool_parser_plugin reasoning_parser_plugin logits_processors enable_custom_logit_processor"
        ),
        "the operator chooses the chat template: --chat-template": "trust_request_chat_template",
        # What the server is.
        "the page at / holds no data, and what it asks for needs a key: leave it out": (
            "no_webui webui_config webui_config_file"
        ),
        "a proxy adds TLS, a prefix, and other files": "ssl_* api_prefix root_path path",
        "--cors-origins names the origins whose pages may call the API": (
            "allow_credentials allowed_methods allowed_headers"
        ),
        "/docs and /openapi.json are always there": "disable_fastapi_docs",
        "use --log-level debug, info, warning or error; the log goes to standard error": (
            "v verbose log_verbose lv verbosity log_verbosity log_disable log_file uvicorn_log_level log_level_http "
            "disable_uvicorn_access_log verbose_prompt"
        ),
        "prompts are never logged": "log_requests* enable_log_requests",
        "a step's time limit is --stall-timeout": "watchdog_timeout",
        "the engine warms up before it is ready": "no_warmup warmups",
        "use --cuda-graph-max-bs, or --disable-cuda-graph": (
            "o o0 o1 o2 o3 compilation_config enable_profile_cuda_graph"
        ),
        "use --overlap-depth 0": "disable_overlap_schedule no_async_scheduling",
        "choose the GPU with CUDA_VISIBLE_DEVICES": "main_gpu mg base_gpu_id gpu_id_step",
        "use --max-running-requests, and --chunked-prefill-size": "max_num_partial_prefills max_long_partial_prefills",
        "use --mamba-scheduler-strategy": "mamba_cache_mode",
        "convolution states have the type of --dtype, scans' that of --mamba-ssm-dtype": "mamba_cache_dtype",
        "states are kept where conversations go on, and every --anchor-interval tokens of a long prompt": (
            "mamba_block_size prefix_cache_retention_interval checkpoint_min_step"
        ),
        "all states share one pool, of --max-mamba-cache-size slots": (
            "ctx_checkpoints ctxcp swa_checkpoints mamba_max_states_per_path"
        ),
        "a cached state has the type of a live one: --mamba-ssm-dtype": "enable_int8_mamba_checkpoint",
        "KV, windows and states have pools of their own: --mamba-full-memory-ratio divides the memory": (
            "enable_unified_memory disable_hybrid_swa_memory disable_hybrid_kv_cache_manager"
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
            "float16 half fp16 f16"
        ),
    }
)
# Values of --kv-cache-dtype that the field knows.
ABSENT_KV_DTYPES: Final = ABSENT_DTYPES | _by_name(
    {
        "8-bit keys and values are integers with a scale per token and head here: use int8": ("fp8 fp8_e4m3 fp8_e5m2"),
        "keys and values have 8 bits or more: use int8": "q4_0 q4_1 q5_0 q5_1 iq4_nl",
    }
)
# Values of --kv-cache-dtype that llama-server spells otherwise.
KV_DTYPE_SYNONYMS: Final = MappingProxyType({"bf16": "bfloat16", "f32": "float32", "q8_0": "int8"})
# Values of --quantization that the field knows.
ABSENT_QUANTIZATIONS: Final = _by_name(
    {
        "a GGUF file's own codes are kept where that loses nothing: use file, or leave it out": "gguf",
        "a checkpoint's own codes are found by its config.json and kept: use file, or leave it out": (
            "awq awq_marlin gptq gptq_marlin compressed-tensors fbgemm_fp8 modelopt modelopt_fp8 modelopt_fp4 mxfp4"
        ),
        "FP8 of a checkpoint is found by its config.json and kept: use file, or leave it out; of others use int8": (
            "fp8 w8a8_fp8"
        ),
        "weights in these codes are not read by this version: give the checkpoint in bfloat16 and use int8 or int4": (
            "bitsandbytes"
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
    accepted = next((found.line for option, found in ACCEPTED.items() if as_key(option) == key), "")
    return ABSENT.get(key, accepted) or next(
        (line for name, line in ABSENT.items() if name.endswith("*") and key.startswith(name[:-1])), ""
    )


def as_key(option: str) -> str:
    """`--max-model-len` -> `max_model_len`."""
    return option.lstrip("-").replace("-", "_").lower()
