"""Fields of other engines' requests: those that cannot change an answer pass, and the others are refused with the
equivalent field. A header lists the ignored fields for the client."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from forebay.base.sampling import DRAWS

# Whatever their value, the tokens are the same: hints about caches, ids and timings.
PASSED: Final = frozenset(
    {
        *("prompt_cache_options", "prompt_cache_retention", "service_tier", "store", "prediction"),  # OpenAI's
        *("mm_processor_kwargs", "spaces_between_special_tokens", "guided_decoding_backend"),  # vLLM's
        *("rid", "custom_params", "bootstrap_info", "routed_dp_rank", "data_parallel_rank", "log_metrics"),  # SGLang's
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse"),  # llama.cpp's
        *("timings_per_token", "return_progress", "keep_alive"),
    }
)


_DRAWS: Final = [number.name for number in DRAWS]


def _by_name(names: Mapping[str, str]) -> MappingProxyType[str, str]:
    return MappingProxyType({name: line for line, of in names.items() for name in of.split()})


ABSENT: Final = _by_name(
    {
        f"this sampler is not in this version: use {', '.join(_DRAWS[:-1])} and {_DRAWS[-1]}": (
            "typical_p typ_p tfs_z mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent xtc_probability "
            "xtc_threshold top_a epsilon_cutoff eta_cutoff smoothing_factor top_n_sigma samplers"
        ),
        "penalties are repetition_penalty, presence_penalty and frequency_penalty, over all tokens": (
            "penalty_last_n repeat_last_n dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
            "dry_sequence_breakers no_repeat_ngram_size repetition_detection"
        ),
        "call it repetition_penalty": "repeat_penalty penalty_repeat",
        "outputs are sampled, not searched for: leave it out": (
            "use_beam_search beam_width num_beams length_penalty early_stopping"
        ),
        "prompts are never cut: send what fits into the context": "truncate_prompt_tokens truncation_side truncate",
        "call it max_tokens": "max_new_tokens num_predict max_length",
        "call it seed": "sampling_seed",
        "call it cache_salt": "extra_key",
        "call it stop": "stop_str stop_sequences",
        "call it include_stop_str_in_output": "no_stop_trim",
        "call it logprobs": "n_probs return_logprob top_logprobs_num top_n_tokens",
        "call it prompt_logprobs": "decoder_input_details logprob_start_len",
        "call it reasoning_effort or enable_thinking": "think reasoning_budget thinking_forced_open",
        "call it structured_outputs, or response_format": (
            "regex ebnf format structural_tag guided_whitespace_pattern grammar_lazy grammar_triggers preserved_tokens"
        ),
        "the tokens of a text are told by /tokenize, and those of an answer with their logprobs": (
            "return_tokens_as_token_ids return_text_in_logprobs details detokenize"
        ),
        "call it return_token_ids": "return_tokens",
        "token ids go into prompt, of /v1/completions": "prompt_token_ids",
        "log-probabilities are of the likeliest tokens: ask for up to 20 of them (logprobs, top_logprobs)": (
            "token_ids_logprob logprob_token_ids post_sampling_probs min_keep"
        ),
        "call it n": "n_cmpl",
        "call it echo, of a completion": "return_full_text",
        "temperature 0 is greedy, any other is not": "do_sample",
        "the whole answer is sent": "response_fields",
        "time is limited for all, by --request-timeout": "t_max_predict_ms n_indent",
        "calls and thinking are read as the model's chat template spells them": "reasoning_format parse_tool_calls",
        "the context's length is the operator's choice: --context-length": "num_ctx",
        "fields stand in the body itself": "options sampling_params vllm_xargs",
        "the chat template is the operator's choice: --chat-template": "template raw",
        "send the whole conversation: what was computed of it before is found again": (
            "context session_params session_id"
        ),
        "send a message of the role system": "system",
        "a prompt is text or token ids": "prompt_embeds input_embeds prompt_data",
        "the halves of a request meet by bootstrap_host, bootstrap_port and bootstrap_room": "kv_transfer_params",
        "an answer is not marked": "watermark",
        "call it min_tokens": "min_new_tokens min_length",
        "call it bad_words, and write texts": "bad_words_ids",
        "call it stop_token_ids": "stop_token",
        "an adapter (LoRA) is named by model": "lora lora_path lora_request adapter adapter_id",
        "send images as parts of a chat's messages; audio and video are not served": (
            "images image_data video_data audio_data"
        ),
        "hidden states are not handed out": "return_hidden_states hidden_states return_routed_experts",
        "a logits processor is code, and a client's is not run: use logit_bias": (
            "logits_processors custom_logit_processor"
        ),
        "documents go into messages: retrieval is the client's": "documents",
    }
)


OTHER_ROUTES: Final = _by_name(
    {
        "this route gives one answer: ask again, or /v1/chat/completions for several": "n best_of",
        "this route's answer has no place for it: /v1/chat/completions has, or /v1/completions": (
            "logprobs prompt_logprobs return_token_ids echo include_reasoning separate_reasoning stream_reasoning"
        ),
        "a chat says how its prompt ends: ask /v1/chat/completions": "add_generation_prompt continue_final_message",
        "this route says it in its own words: reasoning (/v1/responses), thinking (/v1/messages), and a plain prompt "
        "goes through no chat template": (
            "enable_thinking thinking chat_template_kwargs reasoning_effort max_thinking_tokens"
        ),
        "it is for plain prompts: /v1/completions takes it": "add_special_tokens parse_special",
        "call it metadata.user_id": "user",
        "call it max_tokens, max_output_tokens of /v1/responses, or n_predict of /completion": (
            "max_tokens max_completion_tokens n_predict"
        ),
        "answers are text alone, with nothing behind them: leave it out": "suffix modalities audio web_search_options",
        "tell it where this route has it: text.verbosity of /v1/responses": "verbosity",
        "it belongs to another route's stream: leave it out": "stream_options",
        "requests are numbered by the server, or by the header x-request-id": "request_id",
        "call it cache_salt": "safety_identifier prompt_cache_key",
        "call it n_probs, of /completion, or ask another route": "top_logprobs",
    }
)
"""Fields that some routes take, for the others."""


def why_absent(name: str) -> str:
    """The line about a field that the field has and this version has not; empty for all others."""
    return ABSENT.get(name) or OTHER_ROUTES.get(name, "")
