"""The official client, unchanged, against a real server on a loopback port."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.deadlines import HANGS_S
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine


def client(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANGS_S)


ASK = [{"role": "user", "content": "hello world"}]


def test_chat_streamed_and_whole_are_the_same_text(shared: Running) -> None:
    with client(shared) as api:
        whole = api.chat.completions.create(model="tiny", messages=ASK, seed=1, max_tokens=12)
        stream = api.chat.completions.create(
            model="tiny", messages=ASK, seed=1, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12 == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 1
    assert whole.usage.cache == chunks[-1].usage.cache
    assert (whole.usage.cache["cached_tokens"], whole.usage.cache["miss_reason"]) == (1, "not_cached_yet")


def test_chat_logprobs_cover_every_token(shared: Running) -> None:
    with client(shared) as api:
        answer = api.chat.completions.create(model="tiny", messages=ASK, max_tokens=5, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_n_choices_differ_and_repeat_with_the_seed(shared: Running) -> None:
    with client(shared) as api:
        first, again = (
            api.chat.completions.create(model="tiny", messages=ASK, n=3, seed=5, max_tokens=6) for _ in range(2)
        )
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 18


def test_completions_take_several_prompts_and_ids(shared: Running) -> None:
    with client(shared) as api:
        answer = api.completions.create(model="tiny", prompt=["hello", " world"], seed=1, max_tokens=3, n=2)
        by_ids = api.completions.create(model="tiny", prompt=shared.tokenizer.encode("hello"), seed=1, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == by_ids.choices[0].text


def test_echo_with_logprobs_is_what_lm_eval_needs(shared: Running) -> None:
    ids = shared.tokenizer.encode("hello world, hello")
    with client(shared) as api:
        for max_tokens in (0, 1):
            answer = api.completions.create(
                model="tiny", prompt=[ids], max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1
            )
            scores = answer.choices[0].logprobs
            assert len(scores.tokens) == len(ids) + max_tokens
            assert scores.token_logprobs[0] is None
            assert scores.top_logprobs[0] is None
            assert all(value is not None for value in scores.token_logprobs[1:])
            text = answer.choices[0].text
            assert text.startswith("hello world, hello")
            for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
                assert text[offset : offset + len(token)] == token
            assert answer.usage.completion_tokens == max_tokens


def test_models_are_listed_and_found(shared: Running) -> None:
    with client(shared) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert api.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            api.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own_types(shared: Running) -> None:
    with client(shared) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="tiny", messages=ASK, extra_body={"temprature": 1})
        assert caught.value.body["message"] == "unknown field 'temprature': did you mean temperature?"
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="tiny", prompt="hello", max_tokens=9000)
    assert caught.value.code == "context_length_exceeded"


def test_engine_death_inside_a_stream_is_a_typed_error(launch) -> None:
    server = launch(lambda: FakeEngine(interval_s=0.02))
    with client(server) as api:
        stream = api.chat.completions.create(model="tiny", messages=ASK, max_tokens=500, stream=True)
        next(iter(stream))
        server.call(server.engine.die)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "engine_dead"


def test_async_client_streams_many_at_once(shared: Running) -> None:
    async def one(api: openai.AsyncOpenAI, seed: int) -> str:
        stream = await api.chat.completions.create(model="tiny", messages=ASK, seed=seed, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(one(api, seed) for seed in range(16)))

    texts = asyncio.run(many())
    assert len(set(texts)) == 16
