"""What a client reads about a wrong body: which field, by how much, and a code that stays."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.base.foreign import ABSENT_FIELDS
from forebay.server.api.openai.responses_request import ResponsesRequest
from forebay.server.protocol.requests import ChatRequest, CompletionRequest, TokenizeRequest
from forebay.server.protocol.strict import Strict

HI = {"role": "user", "content": "hello"}
OTHER = {"type": "function", "function": {"name": "g"}}
COMPLETION: list[tuple[dict[str, Any], str, str, str]] = [
    ({"stop": ["x"] * 17}, "invalid_value", "stop", "stop has 17 entries: at most 16"),
    ({"stop": 5}, "invalid_value", "stop", "a string or a list of strings"),
    ({"stop": ""}, "invalid_value", "stop", "stop is empty"),
    ({"stop": ["a", ""]}, "invalid_value", "stop.1", "stop.1 is empty"),
    ({"stop": ["a", 1]}, "invalid_value", "stop.1", "must be a string, not 1"),
    ({"stop": ["\u00e9" * 200]}, "invalid_value", "stop", "400 bytes: at most 256"),
    ({"stop_regex": "(a"}, "invalid_value", "stop_regex", "a bracket is not closed (at character 2)"),
    ({"stop_regex": ["a"] * 5}, "invalid_value", "stop_regex", "at most 4"),
    ({"prompt": []}, "invalid_value", "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "invalid_value", "prompt.0", "prompt.0 is empty"),
    ({"prompt": ["a", 1]}, "invalid_value", "prompt.1", "a string or a list of token ids"),
    (
        {"logit_bias": {"int": 1}},
        "invalid_value",
        "logit_bias",
        "['int'] must be a token id in decimal digits",
    ),
    ({"logit_bias": {"7": "x"}}, "invalid_value", "logit_bias", "logit_bias['7'] must be a number"),
    ({"prompt": [1, "a"]}, "invalid_value", "prompt.1", "must be an integer"),
    ({"prompt": [True]}, "invalid_value", "prompt.0", "must be an integer"),
    ({"prompt": [[5, -1]]}, "invalid_value", "prompt.0.1", "must be at least 0, not -1"),
    ({"prompt": None}, "invalid_value", "prompt", "a list of token ids"),
    ({"logit_bias": {"abc": 1}}, "invalid_value", "logit_bias", "logit_bias['abc'] must be a token id"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias", "logit_bias['5'] must be at most 100, not 101"),
    ({"suffix": "end"}, "unsupported_field", "suffix", "leave it out"),
    ({"tools": [{}]}, "unsupported_field", "tools", "leave it out"),
    ({"best_of": 3}, "unsupported_field", "best_of", "best_of is 3 and n is 1"),
    ({"max_tokens": 0}, "invalid_combination", "max_tokens", "without echo=true"),
    ({"stream_options": {}}, "invalid_combination", "stream_options", "with stream=true"),
    ({"stream": True, "echo": True, "logprobs": 1}, "invalid_combination", "echo", "stream=false"),
    ({"stream_options": {"usage": True}}, "unknown_field", "stream_options.usage", "unknown field"),
    ({"stream_options": {"stream": True}}, "unknown_field", "stream_options.stream", "unknown field"),
    ({"temprature": 1}, "unknown_field", "temprature", "did you mean temperature?"),
    ({"min_new_tokens": 2}, "unknown_field", "min_new_tokens", "call it min_tokens"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids", "is empty"),
    ({"bad_words": ["x"] * 65}, "invalid_value", "bad_words", "65 entries: at most 64"),
    ({"max_tokens": 3, "n_predict": 4}, "invalid_combination", "n_predict", "n_predict and max_tokens: give one"),
    ({"n_predict": 0}, "invalid_combination", "n_predict", "at least 1"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_combination", "prompt_logprobs", "stream=false"),
    ({"mirostat": 2}, "unknown_field", "mirostat", "use temperature, top_k, top_p and min_p"),
    ({"max_new_tokens": 2}, "unknown_field", "max_new_tokens", "call it max_tokens"),
    ({"n": 10**400}, "invalid_value", "n", "must be at most 1.04858e+06"),
]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: list[tuple[dict[str, Any], str, str, str]] = [
    ({"top_logprobs": 2}, "invalid_combination", "top_logprobs", "with logprobs=true"),
    ({"metadata": {"a": 1}}, "invalid_value", "metadata", "an object of at most 16 strings"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "invalid_value", "metadata", "at most 16"),
    ({"user": 5}, "invalid_value", "user", "must be a string, not 5"),
    ({"messages": []}, "invalid_value", "messages", "messages is empty"),
    ({"messages": ["x"]}, "invalid_value", "messages.0", "must be an object"),
    ({"messages": [HI, {**HI, "role": "robot"}]}, "invalid_value", "messages.1.role", "'assistant'"),
    ({"messages": [HI, {**HI, "role": "tool"}]}, "missing_field", "messages.1.tool_call_id", "whose result"),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages.0.content", "is missing"),
    ({"messages": [{**HI, "content": None}]}, "missing_field", "messages.0.content", "is missing"),
    ({"messages": [{**HI, "tool_calls": [CALL]}]}, "invalid_combination", "messages.0.tool_calls", "role assistant"),
    ({"tools": [{}]}, "missing_field", "tools.0.type", "is missing"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools", "two tools with the name f"),
    ({"tools": [TOOL] * 1025}, "invalid_value", "tools", "1025 entries"),
    ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "invalid_value", "tools.0.function.name", "must match"),
    ({"tool_choice": "required"}, "invalid_combination", "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": OTHER}, "invalid_value", "tool_choice.function.name", "with the name g"),
    ({"tools": [TOOL], "tool_choice": 5}, "invalid_value", "tool_choice", "none, auto, required"),
    ({"thinking": {"type": "adaptive"}}, "invalid_value", "thinking.type", "'enabled' or 'disabled'"),
    ({"thinking": 1}, "invalid_value", "thinking", "true, false or"),
    ({"thinking": True, "enable_thinking": False}, "invalid_combination", "enable_thinking", "contradicts itself"),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
        "invalid_combination",
        "reasoning_effort",
        "must say the same",
    ),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "invalid_combination",
        "reasoning_effort",
        "must say the same",
    ),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_combination", "prompt_logprobs", "stream=false"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_combination",
        "continue_final_message",
        "add_generation_prompt=false",
    ),
    ({"stream_reasoning": False}, "unsupported_field", "stream_reasoning", "leave it out"),
    ({"messages": [{**HI, "content": ["x"]}]}, "invalid_value", "messages.0.content.0", "must be an object"),
]


def assert_said(body: type[Strict], data: dict[str, Any], code: str, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body.parse(data)
    error = refused.value
    assert (error.code, error.param) == (code, param), error.message
    assert words in error.message


@pytest.mark.parametrize(("change", "code", "param", "words"), COMPLETION)
def test_a_wrong_completion_is_told_what_is_wrong(change: dict[str, Any], code: str, param: str, words: str) -> None:
    assert_said(CompletionRequest, {"prompt": "hello", **change}, code, param, words)


@pytest.mark.parametrize(("change", "code", "param", "words"), CHAT)
def test_a_wrong_chat_is_told_what_is_wrong(change: dict[str, Any], code: str, param: str, words: str) -> None:
    assert_said(ChatRequest, {"messages": [HI], **change}, code, param, words)


def test_what_cannot_change_an_answer_passes_and_is_told() -> None:
    data = {"messages": [HI], "cache_prompt": True, "store": None, "service_tier": "flex"}
    assert ChatRequest.parse(data).passed_over == ("cache_prompt", "service_tier")


@pytest.mark.parametrize(("asked", "wanted"), [({}, 16), ({"n_predict": 5}, 5), ({"n_predict": -1}, None)])
def test_llama_cpps_name_for_the_most_tokens_is_known(asked: dict[str, Any], wanted: int | None) -> None:
    assert CompletionRequest.parse({"prompt": "hello", **asked}).wanted == wanted
    assert ChatRequest.parse({"messages": [HI], **asked}).wanted == (wanted if asked else None)


def test_what_nobody_knows_passes_where_the_operator_says_so() -> None:
    data = {"messages": [{**HI, "mood": "good"}], "zebra": 1}
    assert_said(ChatRequest, data, "unknown_field", "zebra", "unknown field")
    assert ChatRequest.parse(data, lenient=True).passed_over == ("zebra", "mood")
    with pytest.raises(InvalidRequest, match="use temperature"):  # it would change the answer
        ChatRequest.parse({**data, "mirostat": 1}, lenient=True)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_other_media_are_told_that_only_text_is_served(kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:,"}}]
    data = {"messages": [HI, {"role": "user", "content": parts}]}
    assert_said(ChatRequest, data, "unsupported_field", "messages.1.content.1.type", "only text parts are supported")


def test_a_text_to_tokenize_has_one_source() -> None:
    assert_said(TokenizeRequest, {}, "missing_field", "prompt", "neither prompt nor messages")
    both = {"prompt": "x", "messages": [HI]}
    assert_said(TokenizeRequest, both, "invalid_combination", "messages", "both prompt and messages")


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}, {"k" * 64: "v" * 512}])
def test_metadata_is_taken_and_changes_nothing(metadata: Any) -> None:
    assert ChatRequest.parse({"messages": [HI], "metadata": metadata}) == ChatRequest.parse({"messages": [HI]})


THEIRS = {  # fields of requests to other engines, by whose they are
    "vllm": (
        "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids "
        "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
        "truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words add_generation_prompt "
        "continue_final_message documents chat_template_kwargs mm_processor_kwargs guided_json guided_regex "
        "guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag "
        "structured_outputs priority request_id logits_processors return_tokens_as_token_ids return_token_ids "
        "cache_salt kv_transfer_params vllm_xargs include_reasoning prompt_embeds logprob_token_ids "
        "repetition_detection"
    ),
    "sglang": (
        "regex ebnf json_schema min_new_tokens no_stop_trim stop_regex lora_path session_params "
        "separate_reasoning stream_reasoning return_hidden_states return_routed_experts rid extra_key "
        "bootstrap_host bootstrap_room data_parallel_rank custom_params custom_logit_processor input_embeds "
        "image_data return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
        "return_text_in_logprobs log_metrics sampling_seed max_new_tokens"
    ),
    "llama.cpp": (
        "n_predict n_indent n_keep t_max_predict_ms dynatemp_range typical_p repeat_penalty repeat_last_n "
        "dry_multiplier xtc_probability mirostat mirostat_tau grammar grammar_lazy json_schema n_probs "
        "min_keep id_slot cache_prompt return_tokens samplers timings_per_token return_progress "
        "post_sampling_probs response_fields lora n_cmpl reasoning_format reasoning_budget "
        "thinking_forced_open parse_tool_calls"
    ),
    "others": (
        "options format keep_alive think raw template context num_predict num_ctx images system do_sample "
        "details return_full_text top_n_tokens truncate watermark max_length num_beams no_repeat_ngram_size "
        "top_a"
    ),
}


@pytest.mark.parametrize("whose", THEIRS)
def test_each_field_of_another_engine_is_served_or_passed_or_answered_with_what_there_is(whose: str) -> None:
    """Never by a guess at its spelling."""
    for name in THEIRS[whose].split():
        if name in ChatRequest.names() or name in ChatRequest.ignored:
            continue
        lenient = {"messages": [HI], name: 1}
        if name in ChatRequest.passed:
            assert ChatRequest.parse(lenient).passed_over == (name,)
            continue
        with pytest.raises(InvalidRequest) as refused:
            ChatRequest.parse(lenient, lenient=True)
        said = refused.value.message
        assert refused.value.code == "unknown_field"
        assert said.startswith(f"unknown field '{name}': "), said
        assert "did you mean" not in said, said
        ours = said.partition(": call it ")[2].partition(",")[0].partition(" or ")[0]
        assert not ours or ours in {**ChatRequest.names(), **CompletionRequest.names()}, said


def test_no_line_is_about_a_field_that_is_served() -> None:
    assert not set(ABSENT_FIELDS) & {*ChatRequest.names(), *CompletionRequest.names()}


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("allowed_callers", [None, ["direct"]], [["code"], False, []]),
        ("async", [None, False], [True, ["direct"]]),
        ("output_schema", [None], [{}, False]),
    ],
)
def test_field_of_a_function_of_responses_is_taken_if_it_changes_nothing(
    field: str, taken: list[Any], refused: list[Any]
) -> None:
    def parse(value: Any) -> None:
        tool = {"type": "function", "name": "f", "parameters": {}, field: value}
        ResponsesRequest.parse({"input": "a", "tools": [tool]})

    for value in taken:
        parse(value)
    for value in refused:
        with pytest.raises(InvalidRequest) as error:
            parse(value)
        assert error.value.param == f"tools.0.{field}"
