"""Fields of other engines' requests: those that cannot change an answer pass, and of the others it is said what there
is instead. A client is told in a header what was passed over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Whatever their value, the tokens are the same: hints about caches, ids and timings.
PASSED: Final = frozenset(
    {
        *("prompt_cache_options", "prompt_cache_retention", "service_tier", "store", "prediction"),  # OpenAI's
        *("request_id", "mm_processor_kwargs", "spaces_between_special_tokens"),  # vLLM's
        *("rid", "custom_params", "bootstrap_info", "routed_dp_rank"),  # SGLang's
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse"),  # llama.cpp's
        *("timings_per_token", "return_progress", "keep_alive"),
    }
)


def _by_name(names: Mapping[str, str]) -> MappingProxyType[str, str]:
    return MappingProxyType({name: line for line, of in names.items() for name in of.split()})


ABSENT: Final = _by_name(
    {
        "this sampler is not in this version: use temperature, top_k, top_p and min_p": (
            "typical_p typ_p tfs_z mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent xtc_probability "
            "xtc_threshold top_a epsilon_cutoff eta_cutoff smoothing_factor top_n_sigma samplers"
        ),
        "penalties are repetition_penalty, presence_penalty and frequency_penalty, over all tokens": (
            "penalty_last_n repeat_last_n dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
            "dry_sequence_breakers no_repeat_ngram_size"
        ),
        "call it repetition_penalty": "repeat_penalty penalty_repeat",
        "outputs are sampled, not searched for: leave it out": (
            "use_beam_search beam_width num_beams length_penalty early_stopping"
        ),
        "prompts are never cut: send what fits into the context": "truncate_prompt_tokens truncation_side",
        "call it max_tokens": "max_new_tokens num_predict max_length",
        "no least length can be asked for: ignore_eos goes on to max_tokens, logit_bias holds single tokens back": (
            "min_tokens min_new_tokens min_length"
        ),
        "which tokens may come is said by a grammar (response_format, structured_outputs) or by logit_bias": (
            "allowed_token_ids bad_words bad_words_ids"
        ),
        "a message is not gone on with: send its text as the prompt of a completion": "continue_final_message",
        "log-probabilities of prompts come with /v1/completions": "prompt_logprobs",
        "call it stop_token_ids": "stop_token",
        "adapters (LoRA) are not in this version": "lora lora_path lora_request adapter adapter_id",
        "only text is served by this version": "images image_data video_data audio_data",
        "hidden states are not handed out": "return_hidden_states hidden_states",
        "a logits processor is code, and a client's is not run: use logit_bias": (
            "logits_processors custom_logit_processor"
        ),
        "documents go into messages: retrieval is the client's": "documents",
    }
)


def why_absent(name: str) -> str:
    """The line about a field that the field has and this version has not; empty for all others."""
    return ABSENT.get(name, "")
