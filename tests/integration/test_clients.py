"""The official client against the whole tree with the embedded model, and what the tree tells about itself.

Scorecard C-7: a stream's text is that of the whole answer, and the usage adds up.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.text.tokenizer import Tokenizer
from tests import loopback
from tests.deadlines import HANGS_S
from tests.integration.tree import Tree, serving

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
PAGE = 16
# With activations of 8 bits, the default of CPUs without AMX, the model does not know its capital.
CONFIG = """
max_running_requests = 12
kv_cache_bytes = "64MiB"
context_length = 1024
activation_bits = 16
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("clients")
    file = folder / "forebay.toml"
    file.write_text(CONFIG)
    flags = ("--dtype=float32", "--config", str(file), "--max-running-requests=8")
    with serving(folder / "tree", embedded_model, *flags) as started:
        yield started


@pytest.fixture(scope="module")
def api(tree: Tree) -> Iterator[openai.OpenAI]:
    with (
        loopback.client() as http,
        openai.OpenAI(
            base_url=f"{tree.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S, http_client=http
        ) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_path(str(embedded_model), None)


def complete(api: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return api.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields})


def chat(api: openai.OpenAI, messages: list[dict[str, str]], **fields: Any) -> Any:
    return api.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    )


def test_the_model_knows_its_capital(api: openai.OpenAI) -> None:
    answer = chat(api, [{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.slow
def test_text_and_token_ids_are_the_same_prompt(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    assert complete(api, ids).choices[0].text == complete(api).choices[0].text
    several = complete(api, [ids, tokenizer.encode("One, two, three,")])
    assert [choice.text for choice in several.choices] == [
        complete(api, prompt).choices[0].text for prompt in (PROMPT, "One, two, three,")
    ]
    assert several.usage.prompt_tokens == len(ids) + len(tokenizer.encode("One, two, three,"))


@pytest.mark.slow
def test_echoed_scores_agree_with_the_scores_of_generation(api: openai.OpenAI) -> None:
    """What the model chose with a log-probability has the same one when it is read back as a prompt."""
    written = complete(api, logprobs=3)
    scores = written.choices[0].logprobs
    read = complete(api, PROMPT + written.choices[0].text, echo=True, logprobs=3, max_tokens=0)
    echoed = read.choices[0].logprobs
    assert read.choices[0].text == PROMPT + written.choices[0].text
    assert echoed.tokens[-12:] == scores.tokens
    assert echoed.token_logprobs[0] is None
    # A prompt's rows and a decoded row go through the same kernels: no rounding lies between them.
    assert echoed.token_logprobs[-12:] == pytest.approx(scores.token_logprobs, abs=1e-6)
    for token, value, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert value == max(top.values()) == top[token], "greedy takes the most likely token"
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6


@pytest.mark.slow
def test_echo_returns_the_prompt_and_the_continuation(api: openai.OpenAI) -> None:
    plain, echoed = complete(api), complete(api, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text


@pytest.mark.slow
def test_choices_differ_repeat_with_the_seed_and_ignore_other_requests(api: openai.OpenAI) -> None:
    three = complete(api, n=3, temperature=1.0, seed=7)
    again = complete(api, n=3, temperature=1.0, seed=7)
    texts = [choice.text for choice in three.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert complete(api, temperature=1.0, seed=7).choices[0].text == texts[0]
    other = [choice.text for choice in complete(api, n=3, temperature=1.0, seed=8).choices]
    assert not set(other) & set(texts)


def test_a_stop_string_ends_the_text_before_itself(api: openai.OpenAI) -> None:
    whole = complete(api, max_tokens=24).choices[0].text
    stop = whole[5:9]
    cut = complete(api, max_tokens=24, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = list(complete(api, max_tokens=24, stop=[stop, "never"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text


def test_logit_bias_forbids_and_forces(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (paris,) = tokenizer.encode(" Paris")
    assert complete(api, max_tokens=1).choices[0].text == " Paris"
    assert complete(api, max_tokens=1, logit_bias={str(paris): -100}).choices[0].text != " Paris"
    (forced,) = tokenizer.encode(" cheese")
    assert complete(api, max_tokens=3, logit_bias={str(forced): 100}).choices[0].text == " cheese" * 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_streamed_chat_is_the_whole_one(api: openai.OpenAI, logprobs: bool) -> None:
    messages = [{"role": "user", "content": "Count in Chinese: 一, 二, and emoji 👩‍🚀🇫🇷"}]
    options = {"max_tokens": 40, "logprobs": logprobs, **({"top_logprobs": 2} if logprobs else {})}
    whole = chat(api, messages, **options)
    chunks = list(chat(api, messages, stream=True, stream_options={"include_usage": True}, **options))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[0].delta.role == "assistant"
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    if logprobs:
        streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert [entry.token for entry in streamed] == [entry.token for entry in whole.choices[0].logprobs.content]
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)


@pytest.mark.slow
def test_each_turn_of_a_conversation_finds_the_turns_before_it_cached(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages: list[dict[str, str]] = []
    before = 0
    for question in ("Name a colour of the sky, please.", "And one of grass?", "And one of snow?"):
        messages.append({"role": "user", "content": question})
        answer = chat(api, messages)
        usage = answer.usage
        assert usage.prompt_tokens == len(tokenizer.encode_chat(messages))
        # All but the last token of the turn before has KV, in whole pages.
        assert usage.prompt_tokens_details.cached_tokens >= (before - 1) // PAGE * PAGE
        assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens - 1
        before = usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    again = chat(api, messages[:-1])
    assert again.choices[0].message.content == messages[-1]["content"]
    assert again.usage.prompt_tokens_details.cached_tokens == (again.usage.prompt_tokens - 1) // PAGE * PAGE


@pytest.mark.slow
def test_another_salt_shares_nothing(api: openai.OpenAI) -> None:
    """J-6: a prefix is found only under the salt it was computed for."""
    prompt = list(range(1000, 1100))

    def cached(salt: str) -> int:
        answer = complete(api, prompt, max_tokens=1, extra_body={"cache_salt": salt})
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert [cached("mine"), cached("mine"), cached("yours"), cached("mine")] == [0, 96, 0, 96]


def families(tree: Tree) -> dict[str, Any]:
    with tree.client() as client:
        text = client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def total(family: Any) -> float:
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def test_metrics_parse_add_up_and_count(tree: Tree, api: openai.OpenAI) -> None:
    before = families(tree)
    complete(api, max_tokens=5)
    after = families(tree)
    names = ("forebay:generation_tokens", "forebay:prompt_tokens")
    assert [total(after[name]) - total(before[name]) for name in names] == [5, 5]
    slots: dict[str, float] = {}
    for sample in after["forebay:pool_slots"].samples:
        slots[sample.labels["pool"]] = slots.get(sample.labels["pool"], 0) + sample.value
    sizes = {sample.labels["pool"]: sample.value for sample in after["forebay:pool_size"].samples}
    assert slots == sizes
    assert set(sizes) == {"kv", "rows"}
    assert sizes["rows"] == 8


def test_settings_name_their_source_and_their_reason(tree: Tree) -> None:
    with tree.client() as client:
        info = client.get("/server_info").json()
    settings = {setting["name"]: setting for setting in info["settings"]}
    assert all(setting["reason"] for setting in settings.values())
    shown = {name: (settings[name]["value"], settings[name]["source"]) for name in tomllib.loads(CONFIG)}
    assert shown == {
        "max_running_requests": ("8", "flag"),
        "kv_cache_bytes": ("64.0 MiB", "file"),
        "context_length": ("1024", "file"),
        "activation_bits": ("16", "file"),
    }
    assert settings["page_size"]["source"] == "rule"
    assert info["engine"]["max_running_requests"] == 8
    assert info["engine"]["context_length"] == 1024


def test_what_is_too_long_or_unknown_is_refused_in_the_clients_own_types(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(api, [5] * 1020, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="49152"):
        complete(api, [5, 49152])
    with pytest.raises(openai.NotFoundError, match=MODEL):
        complete(api, model="gpt-4")


def test_no_request_of_this_module_left_anything_behind(tree: Tree, api: openai.OpenAI) -> None:
    complete(api)
    assert tree.is_clean()
    counters = tree.state()["counters"]
    assert counters["ledger_violations"] == counters.get("leaked_pages", 0) == counters["engine.step_failures"] == 0


def test_prompts_are_scored_in_vllms_shape(api: openai.OpenAI) -> None:
    choice = complete(api, max_tokens=1, extra_body={"prompt_logprobs": 2}).choices[0].model_dump()
    first, *others = choice["prompt_logprobs"]
    taken = [next(iter(found.values())) for found in others]
    assert first is None
    assert PROMPT.endswith("".join(token["decoded_token"] for token in taken))
    assert all(2 <= len(found) <= 3 for found in others)
    assert all((token["rank"] == 1) == (token["logprob"] == max(t["logprob"] for t in found.values()))
               for token, found in zip(taken, others, strict=True))  # fmt: skip


def test_special_tokens_are_no_text_unless_they_are_asked_for(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|im_end|>", parse_special=True)
    asked = {"max_tokens": 2, "logit_bias": {str(end): 100}, "extra_body": {"ignore_eos": True}}
    assert complete(api, **asked).choices[0].text == ""
    asked["extra_body"]["skip_special_tokens"] = False
    assert complete(api, **asked).choices[0].text == "<|im_end|>" * 2
