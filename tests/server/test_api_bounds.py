"""Numbers of the APIs at their bounds, their defaults, and what each limit of a dialect counts."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.config.server_args import MAX_COUNT
from forebay.http.errors import HttpError
from forebay.server.api import tokens
from forebay.server.api.anthropic.messages_blocks import MAX_PARTS
from forebay.server.api.core import answered, dialect, pooled, prompts, rendezvous
from forebay.server.api.core.answered import Answered
from forebay.server.api.llama.completion import _rates, settings_of
from forebay.server.api.llama.request import LlamaCompletionRequest
from forebay.server.api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
)
from forebay.server.api.openai import compaction, seals, stored_responses, truncation
from forebay.server.api.openai.compaction import for_summary, retained
from forebay.server.api.openai.embeddings_request import (
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSparseRequest,
)
from forebay.server.api.openai.responses_items import MessageItem
from forebay.server.api.openai.seals import Seals
from forebay.server.api.sglang.generate import NativeRequest, _finish
from forebay.server.protocol.requests import ChatRequest
from forebay.text.answers.parts import CallArguments, Said, Thought
from tests.server.test_round_trips import PROMPT, Run

I32, U32 = 2**31 - 1, 2**32 - 1
KIB = 1024


def test_limits_of_the_apis_have_their_values() -> None:
    assert (answered.MOST_SESSIONS, answered.MOST_ANSWERS, answered.MOST_RUNS, answered.TAIL_TOKENS) == (
        256,
        32,
        256,
        32,
    )
    assert (tokens.INLINE_PIECES, dialect.INLINE_SCORES, pooled.INLINE_NUMBERS) == (1024, 1024, 16_384)
    assert (compaction.MAX_SUMMARY_TOKENS, compaction.MAX_RETAINED_CHARS) == (8192, 256 * KIB)
    assert (seals.LIFETIME_S, seals.MAX_BYTES, stored_responses.MAX_PAGE) == (604_800, 256 * KIB, 100)
    assert (MAX_INPUTS, MAX_PARTS, prompts._TAIL_TOKENS, rendezvous.DEFAULT_PORT) == (2048, 256, 128, 8998)
    assert "KEEP_ALIVE_S: Final = 15.0 " in inspect.getsource(dialect)  # tests that wait long change it


MINIMAL: dict[type[Any], dict[str, Any]] = {
    NativeRequest: {"text": "a"},
    LlamaCompletionRequest: {"prompt": "a"},
    OllamaChatRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    OllamaGenerateRequest: {"model": "m", "prompt": "a"},
    OllamaEmbedRequest: {"model": "m", "input": "a"},
    EmbeddingRequest: {"input": "a"},
    RerankRequest: {"query": "q", "documents": ["a"]},
    ClassifyRequest: {"input": "a"},
    PoolingRequest: {"input": "a"},
    TeiEmbedRequest: {"inputs": "a"},
    TeiSparseRequest: {"inputs": "a"},
    TeiPredictRequest: {"inputs": "a"},
}


@pytest.mark.parametrize(
    ("body", "field", "low", "high"),
    [
        (NativeRequest, "top_logprobs_num", 0, 20),
        (NativeRequest, "priority", -(2**31), I32),
        (NativeRequest, "sampling_params.max_new_tokens", 1, I32),
        (NativeRequest, "sampling_params.min_new_tokens", 0, I32),
        (NativeRequest, "sampling_params.n", 1, MAX_COUNT),
        (NativeRequest, "sampling_params.sampling_seed", 0, 2**63 - 1),
        (LlamaCompletionRequest, "n_predict", -1, I32),
        (LlamaCompletionRequest, "n_probs", 0, 20),
        (LlamaCompletionRequest, "repeat_last_n", -1, I32),
        (LlamaCompletionRequest, "seed", -1, U32),
        (OllamaChatRequest, "options.seed", -1, U32),
        (OllamaEmbedRequest, "dimensions", 1, I32),
        (EmbeddingRequest, "dimensions", 1, I32),
        (TeiEmbedRequest, "dimensions", 1, I32),
        (RerankRequest, "top_n", 1, I32),
    ],
)
def test_number_of_a_body_is_accepted_at_both_bounds_and_not_beyond(
    body: type[Any], field: str, low: int, high: int
) -> None:
    def parse(value: int) -> object:
        outer, _, inner = field.rpartition(".")
        return body.parse({**MINIMAL[body], **({outer: {inner: value}} if outer else {inner: value})})

    for value in (low, high):
        assert parse(value)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequest):
            parse(value)


def test_top_logprobs_of_ollama_are_at_most_20() -> None:
    for value, accepted in ((0, True), (20, True), (-1, False), (21, False)):
        body = {**MINIMAL[OllamaChatRequest], "logprobs": True, "top_logprobs": value}
        if accepted:
            assert OllamaChatRequest.parse(body).num_top == value
            continue
        with pytest.raises(InvalidRequest):
            OllamaChatRequest.parse(body)


@pytest.mark.parametrize("count", [0, 1, 2048, 2049])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (EmbeddingRequest, "input"),
        (OllamaEmbedRequest, "input"),
        (ScoreRequest, "text_2"),
        (RerankRequest, "documents"),
        (RerankRequest, "texts"),
        (ClassifyRequest, "input"),
        (PoolingRequest, "input"),
        (TeiEmbedRequest, "inputs"),
        (TeiSparseRequest, "inputs"),
        (TeiPredictRequest, "inputs"),
    ],
)
def test_texts_to_embed_are_1_to_2048(body: type[Any], field: str, count: int) -> None:
    sent: dict[str, Any] = {"text_1": "q"} if body is ScoreRequest else dict(MINIMAL[body])
    if field == "texts":
        del sent["documents"]
    sent[field] = ["a"] * count
    if 1 <= count <= 2048:
        assert body.parse(sent)
        return
    with pytest.raises(InvalidRequest):
        body.parse(sent)


def test_defaults_of_generate_are_sglangs() -> None:
    body = NativeRequest.parse({"text": "a"})
    sampling = body.sampling_params
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.n, sampling.no_stop_trim) == (128, 0, 1, False)
    assert (body.return_logprob, body.top_logprobs_num, body.return_text_in_logprobs) == (False, 0, False)
    assert (body.stream, body.priority, body.has_many) == (False, 0, False)
    assert body.completion.max_tokens == 128


def test_defaults_of_completion_are_llama_servers() -> None:
    body = LlamaCompletionRequest.parse({"prompt": "a"})
    assert (body.n_predict, body.n_probs, body.num_top, body.has_many) == (-1, 0, None, False)
    assert (body.stream, body.return_tokens, body.timings_per_token) == (False, False, False)
    assert body.completion.n_predict == -1


def test_defaults_of_ollama_and_of_rerank_are_theirs() -> None:
    chat = OllamaChatRequest.parse(MINIMAL[OllamaChatRequest])
    assert chat.num_top == -1
    assert chat.chat is not None
    assert chat.chat.stream
    assert OllamaPullRequest.parse({"model": "m"}).stream is None
    rerank = RerankRequest.parse(MINIMAL[RerankRequest])
    assert (rerank.return_documents, rerank.return_text) == (True, False)


@pytest.mark.parametrize(("sent", "many"), [("a", False), (["a"], True), ([1, 2], False), ([[1, 2]], True)])
def test_answer_is_a_list_if_the_prompts_are(sent: Any, many: bool) -> None:
    field = "input_ids" if isinstance(sent, list) and not isinstance(sent[0], str) else "text"
    assert NativeRequest.parse({field: sent}).has_many is many
    assert LlamaCompletionRequest.parse({"prompt": sent}).has_many is many
    assert NativeRequest.parse({field: sent, "sampling_params": {"n": 2}}).has_many


@pytest.mark.parametrize("bias", [-100, 100, 0, False])
def test_llama_bias_of_a_token_is_a_number_or_false(bias: Any) -> None:
    body = LlamaCompletionRequest.parse({"prompt": "a", "logit_bias": [[5, bias]]})
    assert body.completion.logit_bias == {"5": -100.0 if bias is False else bias}


@pytest.mark.parametrize("pair", [[5, -101], [5, 101], [5, True], [5.0, 1], [True, 1], [5], [5, 1, 1]])
def test_llama_bias_that_is_none_is_refused(pair: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        LlamaCompletionRequest.parse({"prompt": "a", "logit_bias": [pair]})


@pytest.mark.parametrize(
    ("number", "milliseconds", "each", "per_s"),
    [(4, 8.0, 2.0, 500.0), (0, 8.0, None, None), (4, 0.0, None, None), (1, 0.5, 0.5, 2000.0)],
)
def test_llama_rates_are_null_if_nothing_was_measured(
    number: int, milliseconds: float, each: float | None, per_s: float | None
) -> None:
    assert _rates("prompt", number, milliseconds) == {
        "prompt_n": number, "prompt_ms": milliseconds, "prompt_per_token_ms": each, "prompt_per_second": per_s,
    }  # fmt: skip


def test_llama_settings_say_that_penalties_are_over_all_tokens() -> None:
    values: Any = SimpleNamespace(seed=7, stop=("x",), ignore_eos=True)
    params: Any = SimpleNamespace(**vars(values), **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), 0.5))
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        setattr(params, name, 0.5)
    found = settings_of(params)
    assert (found["seed"], found["repeat_last_n"], found["stop"], found["ignore_eos"]) == (7, -1, ["x"], True)


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (None, None),
        ("stop", {"type": "stop", "matched": "END"}),
        ("length", {"type": "length", "length": 9}),
        ("tool_calls", {"type": "tool_calls"}),
    ],
)
def test_generate_finish_says_what_matched_or_how_long_it_is(finish: str | None, told: Any) -> None:
    choice: Any = SimpleNamespace(finish=finish, stopped="END", num_tokens=9)
    assert _finish(choice) == told


# Kinds of an answer's tokens.


@pytest.mark.parametrize(
    ("offset", "reason"), [(2, "thinking_removed"), (5, "thinking_removed"), (6, "text_changed"), (11, "text_changed")]
)
def test_reason_is_removed_thinking_within_its_first_4_tokens(offset: int, reason: str) -> None:
    known = Answered()
    known.note("me", PROMPT, [Run(None, 2), Run(Thought, 10), Run(Said, 5)], opened=False)
    assert known.reason("me", [*PROMPT, *range(100)], len(PROMPT) + offset) == reason


@pytest.mark.parametrize(("count", "known"), [(256, True), (257, False)])
def test_answer_of_at_most_256_runs_is_kept(count: int, known: bool) -> None:
    kept = Answered()
    kept.note("me", PROMPT, [Run(CallArguments, 1)] * count, opened=False)
    expected = "arguments_rewritten" if known else "text_changed"
    assert kept.reason("me", [*PROMPT, *range(100)], len(PROMPT)) == expected


# Responses.


def shrunk(context_length: int, wanted: int | None, num_tokens: int, num_items: int, monkeypatch: Any) -> int:
    """How many items of a conversation of `num_items`, of `num_tokens` each, are dropped."""

    async def chat_ids(server: Any, context: Any, messages: list[int], chat: Any) -> list[int]:
        return [0] * (num_tokens * len(messages))

    monkeypatch.setattr(truncation, "chat_ids", chat_ids)
    monkeypatch.setattr(truncation, "check_answerable", lambda *_: None)
    items = [MessageItem(role="assistant", content="x") for _ in range(num_items)]
    made: Any = lambda those: SimpleNamespace(messages=those, wanted=wanted)  # noqa: E731
    body: Any = SimpleNamespace(truncation="auto", chat_of=made)
    info = SimpleNamespace(context_length=context_length)
    server: Any = SimpleNamespace(model=SimpleNamespace(answers=None), engine=SimpleNamespace(info=info))
    context: Any = None
    found: Any = asyncio.run(truncation.truncated(server, context, body, made(items), items))
    return num_items - len(found.messages)


@pytest.mark.parametrize(("wanted", "room"), [(None, 700), (1, 799), (300, 500), (400, 400), (600, 400)], ids=str)
def test_truncation_leaves_room_for_the_answer_and_half_of_the_context_at_least(
    wanted: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shrunk(800, wanted, room, 1, monkeypatch) == 0
    assert shrunk(800, wanted, 1, room, monkeypatch) == 0
    assert shrunk(800, wanted, 1, room + 1, monkeypatch) == 1


@pytest.mark.parametrize("num_items", [2, 3, 7, 8, 50])
@pytest.mark.parametrize("num_tokens", [100, 250, 700, 701])
def test_truncation_drops_no_more_items_than_it_must(
    num_items: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 700 // num_tokens
    expected = max(0, num_items - most) if most else 0  # if not even the last one fits, nothing is dropped
    assert shrunk(800, None, num_tokens, num_items, monkeypatch) == expected


@pytest.mark.parametrize(("wanted", "most"), [(None, 8192), (8191, 8191), (8193, 8192), (1, 1)])
def test_summary_has_8192_tokens_at_most(wanted: int | None, most: int) -> None:
    sent: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    chat = ChatRequest.parse(sent if wanted is None else {**sent, "max_completion_tokens": wanted})
    assert for_summary(chat).max_completion_tokens == most


@pytest.mark.parametrize(("over", "kept"), [(0, 2), (1, 1)])
def test_retained_messages_have_256_ki_characters_together(over: int, kept: int) -> None:
    half = 128 * KIB
    items = [MessageItem(role="user", content="a" * (half + over)), MessageItem(role="user", content="b" * half)]
    found = retained(items)
    assert [item["content"][0]["text"][0] for item in found] == ["a", "b"][-kept:]
    assert all(item["status"] == "completed" and len(item["id"]) == len("msg_") + 24 for item in found)


def test_seal_of_the_largest_content_is_read_and_longer_ones_are_not() -> None:
    made = Seals(b"secret")
    tenant: Any = SimpleNamespace(digest="one")
    longest = made.seal(tenant, bytes(seals.MAX_BYTES), 0.0)
    assert len(longest) < seals.MAX_SEALED_CHARS == (256 * KIB + 256) * 4 // 3 + 64
    assert seals._parts(seals.PREFIX + "A" * (seals.MAX_SEALED_CHARS - len(seals.PREFIX))) is not None
    assert seals._parts(seals.PREFIX + "A" * (seals.MAX_SEALED_CHARS - len(seals.PREFIX) + 4)) is None
    with pytest.raises(HttpError, match=f"at most {256 * KIB} are sealed") as refused:
        made.seal(tenant, bytes(seals.MAX_BYTES + 1), 0.0)
    assert refused.value.status == 413


def test_seal_has_an_expiry_a_nonce_and_at_least_a_byte() -> None:
    for size, is_seal in ((8 + 12, False), (8 + 12 + 1, True)):
        sealed = seals.PREFIX + seals.base64.urlsafe_b64encode(bytes(range(size))).decode()
        parts = seals._parts(sealed)
        assert (parts is not None) is is_seal
        if parts is not None:
            assert [len(part) for part in parts] == [8, 12, 1]


ITEMS = [{"id": f"item_{number}"} for number in range(30)]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, range(29, 9, -1), True),
        ({"limit": "30"}, range(29, -1, -1), False),
        ({"limit": "29"}, range(29, 0, -1), True),
        ({"limit": "100", "order": "asc"}, range(30), False),
        ({"limit": "1", "order": "asc", "after": "item_28"}, range(29, 30), False),
        ({"limit": "2", "order": "asc", "after": "item_0"}, range(1, 3), True),
        ({"order": "asc", "after": "item_29"}, range(0), False),
    ],
)
def test_page_of_items_has_20_unless_it_says_and_names_its_ends(query: dict[str, str], ids: range, more: bool) -> None:
    page = stored_responses._page(ITEMS, query)
    expected = [f"item_{number}" for number in ids]
    assert [item["id"] for item in page["data"]] == expected
    assert (page["first_id"], page["last_id"]) == ((expected[0], expected[-1]) if expected else (None, None))
    assert (page["object"], page["has_more"]) == ("list", more)


@pytest.mark.parametrize("limit", ["0", "101", "1000", "10000", "-1", "x", "", "\u0665", "1.0"])
def test_page_limit_is_1_to_100(limit: str) -> None:
    with pytest.raises(InvalidRequest, match="give a number from 1 to 100"):
        stored_responses._page(ITEMS, {"limit": limit})


@pytest.mark.parametrize("query", [{"order": "up"}, {"after": "item_30"}])
def test_page_of_an_unknown_order_or_item_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        stored_responses._page(ITEMS, query)


# Rooms of a gateway.


def test_rooms_of_choices_follow_the_first_and_wrap() -> None:
    body: Any = SimpleNamespace(bootstrap_room=2**63 - 2)
    assert rendezvous._rooms(body, 3) == [2**63 - 2, 2**63 - 1, 0]
    assert rendezvous._rooms(SimpleNamespace(bootstrap_room=[7, 7]), 2) == [7, 7]  # type: ignore[arg-type]
    assert rendezvous._rooms(SimpleNamespace(bootstrap_room=None), 2) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "is_number"),
    [
        ("0", True),
        (str(2**63 - 1), True),
        ("0" * 19, True),
        ("0" * 20, False),
        ("-1", False),
        ("\u0665", False),
        ("", False),
    ],
)
def test_header_words_of_at_most_19_digits_are_numbers(word: str, is_number: bool) -> None:
    assert rendezvous._is_number(word) is is_number
