"""Each field of another engine's requests that is refused names what there is instead."""

from __future__ import annotations

import pytest

from forebay.base.foreign import ABSENT_FIELDS, OTHER_ROUTES, PASSED, _by_name, why_field_is_absent
from forebay.base.sampling import DRAWS

INSTEAD = {  # one field of each line, or more, and a word of what it says
    "typical_p": f"use {DRAWS[0].name}, ",
    "samplers": f" and {DRAWS[-1].name}",
    "dry_base": "repetition_penalty, presence_penalty",
    "repeat_penalty": "call it repetition_penalty",
    "num_beams": "not searched for",
    "truncate": "fits into the context",
    "cache_control": "prompt_cache_retention keeps a whole prompt",
    "max_new_tokens": "call it max_tokens",
    "sampling_seed": "call it seed",
    "extra_key": "call it cache_salt",
    "stop_str": "call it stop",
    "no_stop_trim": "call it include_stop_str_in_output",
    "n_probs": "call it logprobs",
    "logprob_start_len": "call it prompt_logprobs",
    "think": "call it reasoning_effort",
    "regex": "call it structured_outputs",
    "details": "/tokenize",
    "return_tokens": "call it return_token_ids",
    "prompt_token_ids": "into prompt, of /v1/completions",
    "min_keep": "likeliest tokens",
    "n_cmpl": "call it n",
    "return_full_text": "call it echo",
    "do_sample": "temperature 0",
    "response_fields": "whole answer",
    "n_indent": "--request-timeout",
    "reasoning_format": "as the model's chat template spells",
    "num_ctx": "--context-length",
    "options": "in the body itself",
    "raw": "--chat-template",
    "session_id": "the whole conversation",
    "system": "role system",
    "prompt_embeds": "text or token ids",
    "kv_transfer_params": "bootstrap_room",
    "watermark": "not marked",
    "min_length": "call it min_tokens",
    "bad_words_ids": "call it bad_words",
    "stop_token": "call it stop_token_ids",
    "lora": "named by model",
    "images": "parts of a chat's messages",
    "hidden_states": "not handed out",
    "custom_logit_processor": "logit_bias",
    "documents": "retrieval",
    "best_of": "one answer",
    "echo": "no place for it",
    "add_generation_prompt": "how its prompt ends",
    "enable_thinking": "in its own words",
    "parse_special": "plain prompts",
    "user": "metadata.user_id",
    "n_predict": "max_output_tokens",
    "audio": "text alone",
    "verbosity": "text.verbosity",
    "stream_options": "another route's stream",
    "request_id": "x-request-id",
    "prompt_cache_key": "call it cache_salt",
    "top_logprobs": "n_probs, of /completion",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_foreign_field_that_is_refused_names_what_there_is_instead(name: str) -> None:
    assert INSTEAD[name] in why_field_is_absent(name)


def test_foreign_fields_are_passed_or_absent_and_each_line_has_its_sample() -> None:
    assert not PASSED & (ABSENT_FIELDS.keys() | OTHER_ROUTES.keys())
    lines = {*ABSENT_FIELDS.values(), *OTHER_ROUTES.values()}
    assert lines == {why_field_is_absent(name) for name in INSTEAD}
    assert not why_field_is_absent("temperature") + why_field_is_absent("cache_prompt")


def test_foreign_name_with_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="two lines for seed"):
        _by_name({"call it a": ["seed"], "call it b": ["n", "seed"]})
