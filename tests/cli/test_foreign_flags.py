"""Options that users of vLLM, SGLang and llama.cpp use most, given to `serve` and `plan`: each one is taken, accepted
with a line, or refused with a line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from forebay.base.errors import ConfigError
from forebay.base.foreign import ABSENT_OPTIONS, ACCEPTED_OPTIONS, Accepted, as_key
from forebay.base.sampling import NUMBERS
from forebay.cli.main import main
from forebay.cli.serve import make_parser
from forebay.config.resolve import resolve
from forebay.config.sampling import FLAGS as SAMPLING_FLAGS
from forebay.config.server_args import FLAGS
from forebay.requests.sampling_params import MAX_SEED, SamplingParams
from tests.together import together

# As users write them, one a line: an option, and a value if it takes one.
LLAMA_SERVER = """
-m x.gguf|-hf org/name:Q4_K_M|--hf-repo org/name|--hf-file x.gguf|-a name|--alias name|-c 8192|--ctx-size 8192|-np 4
--parallel 4|-t 8|--threads 8|-tb 8|--threads-batch 8|-ngl 99|--n-gpu-layers 99|--gpu-layers 20|-b 2048
--batch-size 2048|-ub 512|--ubatch-size 512|-fa|-fa on|--flash-attn auto|-ctk q8_0|-ctv q8_0|--cache-type-k f16
--cache-type-v bf16|--jinja|--no-jinja|--temp 0.7|--seed 42|-s 1|--top-k 40|--top-p 0.95|--min-p 0.05
--repeat-penalty 1.1|--repeat-last-n 64|--presence-penalty 0.5|--frequency-penalty 0.5|-n 512|-n -1|--n-predict 512
--predict -1|--slots|--no-slots|--embedding|--embeddings|--reranking|--rerank|--pooling mean|--reasoning-format deepseek
--reasoning-format none|--reasoning-budget 0|--reasoning-budget -1|--cont-batching|-cb|--no-cont-batching|--kv-unified
-kvu|--no-webui|--slot-save-path /tmp|--context-shift|--no-context-shift|--tools all|--offline|--verbose|-v|-lv 3
--log-file x|--mlock|--no-mmap|--numa distribute|--chat-template x.jinja|--chat-template-file x.jinja
--chat-template-kwargs {}|--api-key k|--api-key-file f|--props|--metrics|--lora x.gguf|--mmproj x.gguf|--no-mmproj
--host 0.0.0.0|--port 8080|--timeout 600|-to 600|--threads-http 4|--cache-reuse 256|--cache-ram 8192|--swa-full
--no-warmup|--keep 0|--main-gpu 0|--split-mode none|--tensor-split 1,1|--override-tensor x=CPU|--cpu-moe|--n-cpu-moe 8
--rope-scaling yarn|--yarn-orig-ctx 4096|--grammar x|--json-schema {}|--samplers top_k|--mirostat 2|--dry-multiplier 0.8
--xtc-probability 0.5|--ssl-key-file k|--path /www|--hf-token t|--model-url http://x|--models-dir d|--draft-max 16|-md x
-ngld 99|--ignore-eos|-sp|--no-kv-offload|--defrag-thold 0.1|--logit-bias 1+1|--fit on|--no-repack|--device CUDA0
"""
VLLM = """
--model x|--served-model-name x|--tensor-parallel-size 1|--tensor-parallel-size 2|-tp 2|--pipeline-parallel-size 1
--data-parallel-size 2|--max-model-len 4096|--max-num-seqs 8|--max-num-batched-tokens 2048|--gpu-memory-utilization 0.9
--dtype auto|--dtype half|--quantization awq|--kv-cache-dtype auto|--kv-cache-dtype fp8|--enforce-eager
--trust-remote-code|--enable-prefix-caching|--no-enable-prefix-caching|--enable-chunked-prefill|--swap-space 0
--swap-space 4|--cpu-offload-gb 0|--cpu-offload-gb 4|--enable-auto-tool-choice|--tool-call-parser hermes
--reasoning-parser qwen3|--enable-reasoning|--chat-template x|--chat-template-content-format auto|--download-dir d
--load-format auto|--load-format dummy|--revision main|--tokenizer x|--tokenizer-mode auto|--hf-overrides {}|--seed 0
--disable-log-requests|--enable-log-requests|--disable-log-stats|--uvicorn-log-level info|--max-log-len 100
--limit-mm-per-prompt image=1|--enable-lora|--lora-modules a=b|--max-loras 2|--max-lora-rank 16|--block-size 16
--guided-decoding-backend xgrammar|--speculative-config {}|--kv-transfer-config {}|--compilation-config 3|-O3
--distributed-executor-backend mp|--generation-config auto|--generation-config vllm|--override-generation-config {}
--task embed|--runner pooling|--override-pooler-config {}|--scheduling-policy priority|--async-scheduling
--api-server-count 2|--root-path /x|--ssl-keyfile k|--allowed-origins *|--middleware x|--response-role assistant
--enable-sleep-mode|--enable-expert-parallel|--attention-backend FLASHINFER|--max-logprobs 20|--max-logprobs 50
--enable-prompt-tokens-details|--enable-request-id-headers|--disable-sliding-window|--max-seq-len-to-capture 8192
--num-scheduler-steps 8|--disable-custom-all-reduce|--api-key k|--host 0.0.0.0|--port 8000|--return-tokens-as-token-ids
--enable-server-load-tracking|--disable-uvicorn-access-log|--pooler-config {}|--hf-token t
"""
SGLANG = """
--model-path x|--tokenizer-path x|--context-length 8192|--mem-fraction-static 0.8|--tp 1|--tp-size 2|--dp-size 2
--max-running-requests 32|--max-queued-requests 64|--max-total-tokens 65536|--chunked-prefill-size 2048
--max-prefill-tokens 16384|--schedule-policy lpm|--schedule-conservativeness 1.0|--page-size 16|--device cpu
--stream-interval 1|--stream-interval 4|--random-seed 42|--watchdog-timeout 300|--base-gpu-id 0|--log-level info
--log-level-http warning|--log-requests|--enable-metrics|--decode-log-interval 40|--api-key k|--chat-template x
--completion-template x|--enable-cache-report|--reasoning-parser qwen3|--tool-call-parser qwen25|--nnodes 1
--dist-init-addr x|--node-rank 0|--json-model-override-args {}|--preferred-sampling-params {}|--enable-lora
--lora-paths a|--attention-backend triton|--sampling-backend pytorch|--grammar-backend xgrammar|--disable-radix-cache
--enable-hierarchical-cache|--hicache-ratio 2|--cuda-graph-max-bs 64|--cuda-graph-bs 1|--disable-cuda-graph
--disable-cuda-graph-padding|--disable-overlap-schedule|--enable-mixed-chunk|--enable-dp-attention
--enable-torch-compile|--torchao-config int4wo|--num-continuous-decode-steps 4|--enable-memory-saver
--allow-auto-truncate|--enable-custom-logit-processor|--enable-multimodal|--is-embedding|--skip-server-warmup
--trust-remote-code|--load-format auto|--dtype bfloat16|--quantization fp8|--kv-cache-dtype fp8_e5m2
--speculative-algorithm EAGLE|--speculative-num-steps 3|--speculative-eagle-topk 1|--sampling-defaults openai
--disaggregation-mode null|--skip-tokenizer-init|--mm-attention-backend sdpa|--ep-size 1|--moe-runner-backend triton
"""


def options(text: str) -> list[tuple[str, ...]]:
    return [tuple(entry.split(" ")) for line in text.split("\n") for entry in line.split("|") if entry]


parse = make_parser().parse
EVERY = sorted({*options(LLAMA_SERVER), *options(VLLM), *options(SGLANG)})
OWN = {option for flag in FLAGS for option in flag.options}


@together("words", EVERY)
def test_serve_option_of_another_engine_is_taken_accepted_or_refused_with_a_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    told = outcome(words, capsys)
    kind, _, line = told.partition(": ")
    assert kind in ("taken", "accepted", "refused")
    assert kind == "taken" or len(line) > 15, told
    assert "did you mean" not in told


def outcome(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        parsed = parse(words)
    except ConfigError as error:
        unexplained = error.message == f"there is no flag {words[0]}"
        return "refused: " if unexplained else f"refused: {error.message}"
    assert (len(words) == 1) or "model_path" not in parsed.flags or words[0] in OWN, "its value became the model"
    said = capsys.readouterr().err
    if words[0] in OWN:
        return "taken"
    found = re.fullmatch(r"forebay: note: (\S+).* changes nothing: (.*)\n", said)
    return f"accepted: {found[2]}" if found is not None and found[1] == words[0] else "lost: nothing was said"


def test_lists_of_options_have_the_ninety_that_users_use_most() -> None:
    assert len({words[0] for words in EVERY}) > 200


@together("accepted", ACCEPTED_OPTIONS.values())
def test_serve_accepted_option_tells_its_line_and_leaves_the_model_positional(
    accepted: Accepted, capsys: pytest.CaptureFixture[str]
) -> None:
    value = [accepted.values[0] if accepted.values else "7"] if accepted.takes_value else []
    parsed = parse([accepted.option, *value, "the-model"])
    assert parsed.flags == {"model_path": "the-model"}
    assert capsys.readouterr().err == (
        f"forebay: note: {' '.join([accepted.option, *value])} changes nothing: {accepted.line}\n"
    )
    if accepted.values:
        with pytest.raises(ConfigError, match=re.escape(f"{accepted.option} other")):
            parse([accepted.option, "other", "the-model"])


def test_no_accepted_option_is_one_of_ours_or_refused_for_each_value() -> None:
    assert OWN & ACCEPTED_OPTIONS.keys() == set()
    refused_too = {
        as_key(option): accepted for option, accepted in ACCEPTED_OPTIONS.items() if as_key(option) in ABSENT_OPTIONS
    }
    assert [key for key, accepted in refused_too.items() if not accepted.values] == []
    refused = {as_key(option) for option in OWN} & ABSENT_OPTIONS.keys()
    assert not refused, f"options of Forebay by now: remove them from base/foreign.toml: {sorted(refused)}"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("-n", "512"), "max_tokens"),
        (("--data-parallel-size", "2"), "one machine"),
        (("--reasoning-format", "none"), "--reasoning-parser none"),
        (("--flash-attn", "x.gguf"), "--kernels"),
        (("--generation-config", "vllm"), "--sampling-defaults"),
    ],
)
def test_serve_value_that_asks_for_something_else_is_refused(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        parse(words)
    assert " ".join(words) in caught.value.message


def test_serve_whole_llama_server_line_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-m x.gguf --jinja -fa on -ctk q8_0 -ctv q8_0 -c 8192 -np 4 -ngl 99 -b 2048 -ub 512"
    parsed = parse(f"{line} --temp 0.6 --top-k 20 --seed 7".split())
    assert {name: str(value) for name, value in parsed.flags.items()} == {
        "model_path": "x.gguf", "kv_cache_dtype": "q8_0", "context_length": "8192", "max_running_requests": "4",
        "chunked_prefill_size": "512", "temperature": "0.6", "top_k": "20", "seed": "7",
    }  # fmt: skip
    assert capsys.readouterr().err.count("changes nothing") == 4


def test_cache_types_of_keys_and_values_that_differ_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="-ctk q8_0 and -ctv bf16 contradict each other"):
        parse(["-ctk", "q8_0", "-ctv", "bf16"])


def test_sampling_flags_go_before_the_models_own_values(embedded_model: object) -> None:
    own = resolve({}).server.sampling
    assert resolve({"temperature": 0.5, "top_k": -1, "seed": 7}).server.sampling.values == {
        **own.values, "temperature": 0.5, "top_k": 0, "seed": 7,
    }  # fmt: skip
    assert resolve({"top_p": 0.5, "sampling_defaults": "openai"}).server.sampling.values == {"top_p": 0.5}


def test_sampling_flags_have_the_bounds_of_requests() -> None:
    bounds = {flag.name: (flag.low, flag.high) for flag in SAMPLING_FLAGS}
    assert bounds.pop("top_k") == (-1, 2**31 - 1)
    assert bounds.pop("seed") == (-1, MAX_SEED)
    assert bounds.pop("top_p") == (1e-6, 1.0)
    assert bounds == {name: (NUMBERS[name].low, NUMBERS[name].high) for name in bounds}
    for flag in SAMPLING_FLAGS:
        SamplingParams.defaults(
            {flag.name: flag.read(str(max(flag.low or 0, 0)) if flag.name != "seed" else "-1", "")}, ""
        )


def test_plan_of_a_copied_line_names_the_command_that_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--jinja", "--api-key", "k"]) == 2
    assert "there is no flag --api-key: it is a setting of forebay serve" in capsys.readouterr().err
