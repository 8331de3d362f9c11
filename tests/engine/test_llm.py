"""The whole engine with a real, tiny model: in this process (`LLM`) and in one of its own (`AsyncEngine`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

from forebay.base.errors import ConfigError, Conflict, GenerationError, InvalidRequest, ModelError, RequestTooLarge
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.client.llm import LLM
from forebay.engine.client.scores import token_name
from forebay.engine.client.writing import TextDelta
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason
from tests.deadlines import HANGS_S
from tests.engine.conftest import greedy
from tests.kernels import NATIVE
from tests.models.tiny import Tiny

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kernels": NATIVE,
    "kv_cache_bytes": "2MiB",
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "log_level": "warning",
}


@pytest.fixture(scope="module", params=[0, 1], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest, checkpoint: Tiny) -> LLM:
    return LLM(str(checkpoint.path), overlap_depth=request.param, **FLAGS)


@pytest.mark.slow
def test_the_memory_of_an_engine_that_is_gone_goes_back_to_the_system(checkpoint: Tiny) -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    llm = LLM(str(checkpoint.path), **FLAGS)
    kept = [torch.ones(1 << 20) for _ in range(65)]  # as large as results of steps are, which are kept for the next
    held = resident_bytes()
    del kept[:-1]  # the last is above the others, so that the heap does not shrink
    assert resident_bytes() > held - (64 << 20)
    del llm
    assert resident_bytes() < held - (128 << 20)


def prompts(seed: int, n: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 250) for _ in range(rng.randrange(1, 70))] for _ in range(n)]


@pytest.mark.quick(1)
def test_a_batch_gives_the_greedy_tokens_of_transformers(llm: LLM, checkpoint: Tiny) -> None:
    asked = prompts(0, 10)
    outputs = llm.generate(asked, GREEDY)
    assert [output.token_ids for output in outputs] == [greedy(checkpoint, prompt, 8) for prompt in asked]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)


def test_text_goes_in_and_comes_out(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == llm.tokenizer.encode("hello")
    assert output.text == llm.tokenizer.decode(output.token_ids)


@pytest.mark.parametrize("tags", [(), ("kv_cache",)])
def test_a_tokenizer_rests_with_the_weights_and_texts_are_what_they_were(llm: LLM, tags: tuple[str, ...]) -> None:
    (right,) = llm.generate("hello", GREEDY)
    llm.sleep(*[tags] if tags else [])
    assert (llm.tokenizer._backend._whole is None) is (not tags)
    with pytest.raises(Conflict, match="asleep"):
        llm.generate("hello", GREEDY)
    llm.wake_up()
    (again,) = llm.generate("hello", GREEDY)
    assert (again.prompt_token_ids, again.text) == (right.prompt_token_ids, right.text)


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    text = "<|im_start|>hi<|im_end|>"
    assert output.prompt_token_ids == llm.tokenizer.encode(text, parse_special=True)


def test_prompts_and_chats_may_be_written_as_in_other_engines(llm: LLM) -> None:
    ids = prompts(9, 1)[0]
    alike = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in (ids, {"prompt_token_ids": ids})]
    assert alike[0] == alike[1]
    with pytest.raises(InvalidRequest, match="give prompt or prompt_token_ids"):
        llm.generate({"text": "x"}, GREEDY)
    said = [llm.chat(talk, GREEDY)[0].token_ids for talk in ("hello", [{"role": "user", "content": "hello"}])]
    assert said[0] == said[1]


def test_several_outputs_of_a_prompt_differ_and_the_first_has_the_seed_itself(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=4, n=3)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert [one.index for one in output.outputs] == [0, 1, 2]
    (alone,) = llm.generate([[5, 6, 7]], msgspec.structs.replace(params, n=1))
    assert output.token_ids == alone.token_ids
    assert output.text == output.outputs[0].text == alone.text


def test_a_stop_string_ends_an_output_and_is_left_out_of_its_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    (whole,) = llm.generate("hello", params)
    stop = next(char for char in whole.text[2:] if char not in whole.text[:2])
    for how in ({"stop": stop}, {"stop_regex": re.escape(stop)}):
        (output,) = llm.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, **how))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.outputs[0].stop_reason in (stop, re.escape(stop))
        assert output.token_ids == whole.token_ids[: len(output.token_ids)] != whole.token_ids
    (word,) = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, bad_words=[stop]))
    assert stop not in word.text
    (ended,) = llm.generate("hello", msgspec.structs.replace(params, stop_token_ids=(whole.token_ids[0],)))
    assert (ended.text, ended.outputs[0].stop_reason) == ("", whole.token_ids[0])


def test_log_probabilities_have_the_texts_of_their_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("hello", params)
    assert output.logprobs is not None
    assert [next(iter(each)) for each in output.logprobs] == output.token_ids
    assert all(len(each) == 2 for each in output.logprobs)
    first = output.logprobs[0][output.token_ids[0]]
    assert first.rank == 1
    assert first.decoded_token == token_name(llm.get_tokenizer().table, output.token_ids[0])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(each) for each in output.prompt_logprobs[1:]] == [[token] for token in output.prompt_token_ids[1:]]


def test_prompts_may_come_one_after_the_other_and_a_bar_says_how_fast(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(3, 9)
    outputs = llm.generate((prompt for prompt in asked), GREEDY, use_tqdm=True)
    assert [output.prompt_token_ids for output in outputs] == asked
    shown = capsys.readouterr().err
    assert "9/" in shown
    assert "tok/s" in shown
    with pytest.raises(InvalidRequest, match="nobody knows how many"):
        llm.generate((prompt for prompt in asked), [GREEDY] * 9)


def test_who_failed_is_told_and_not_raised_where_that_is_asked(llm: LLM) -> None:
    fine, long = llm.generate([[5, 6], [5] * 5000], GREEDY, raise_on_error=False)
    assert fine.error is None
    assert isinstance(long.error, RequestTooLarge)
    assert long.finish_reason is FinishReason.ERROR


def test_an_llm_is_closed_at_the_end_of_a_with_and_says_what_it_is(checkpoint: Tiny) -> None:
    with LLM(str(checkpoint.path), **FLAGS) as llm:
        assert repr(llm) == f"LLM({checkpoint.path.name!r}, context_length={llm.info.context_length})"
    assert repr(llm) == "LLM(closed)"
    with pytest.raises(Conflict, match="closed"):
        llm.generate([1, 2, 3])


def test_prompt_that_cannot_fit_fails_alone_and_is_reported_at_the_end(llm: LLM, checkpoint: Tiny) -> None:
    with pytest.raises(GenerationError, match=r"1 of 3 prompts failed; prompt 1: .*5000 tokens") as failed:
        llm.generate([[5, 6], [5] * 5000, [7]], GREEDY)
    error = failed.value
    assert list(error.failures) == [1]
    assert isinstance(error.failures[1], RequestTooLarge)
    assert error.__cause__ is error.failures[1]
    fine, long, other = error.outputs
    assert long.error is error.failures[1]
    assert long.finish_reason is FinishReason.ERROR
    assert fine.token_ids == greedy(checkpoint, [5, 6], 8)
    assert other.text == llm.tokenizer.decode(other.token_ids) != ""


@pytest.mark.parametrize("setting", ["port", "max_n", "cache_isolation", "allowed_host"])
def test_a_setting_of_the_server_is_refused_where_there_is_none(checkpoint: Tiny, setting: str) -> None:
    async def start() -> None:
        async with AsyncEngine.start(str(checkpoint.path), **{setting: 1}):
            pass

    with pytest.raises(ConfigError, match=f"^{setting} is a setting of the HTTP server"):
        LLM(str(checkpoint.path), dtype="float32", **{setting: 1})
    with pytest.raises(ConfigError, match=f"^{setting} is a setting of the HTTP server"):
        asyncio.run(start())


def test_a_failed_conversation_raises_too(llm: LLM) -> None:
    with pytest.raises(GenerationError, match=r"2 of 2 prompts failed; prompt 0: .*; 1 more in `failures`"):
        llm.chat([[{"role": "user", "content": "x" * 5000}]] * 2, GREEDY)


@pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=16, ignore_eos=True), SamplingParams(seed=-1)])
def test_equal_prompts_without_a_seed_are_continued_differently(llm: LLM, params: SamplingParams | None) -> None:
    texts = [tuple(output.token_ids) for output in llm.generate([[5, 6, 7]] * 3, params)]
    assert len(set(texts)) == 3


def test_equal_prompts_with_one_seed_are_continued_alike(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=0)
    first = [tuple(output.token_ids) for output in llm.generate([[5, 6, 7]] * 3, params)]
    again = [tuple(output.token_ids) for output in llm.generate([[5, 6, 7]], params)]
    assert {*first, *again} == {first[0]}


def test_the_second_time_a_prompt_comes_from_the_cache(llm: LLM) -> None:
    prompt = list(range(2, 66))
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.cache.cached_tokens > first.cache.cached_tokens == 0


def test_one_set_of_parameters_per_prompt_or_one_for_all(llm: LLM) -> None:
    short = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([[5], [6]], [short, GREEDY])
    assert [len(output.token_ids) for output in outputs] == [2, 8]
    with pytest.raises(InvalidRequest, match="2 prompts and 1"):
        llm.generate([[5], [6]], [short])


def test_the_report_shows_the_sum_and_what_became_of_it(llm: LLM) -> None:
    items = {(section, item) for section, item, _, _ in llm.info.report}
    assert {("model", "weights"), ("memory", "KV pages"), ("memory", "kv cache allocated")} <= items
    assert llm.info.max_running_requests == 4


@pytest.mark.long
def test_an_engine_in_its_own_process_gives_the_same_tokens_and_texts_piece_by_piece(checkpoint: Tiny) -> None:
    asked = prompts(1, 6)
    endless, two = SamplingParams(max_tokens=400, ignore_eos=True), msgspec.structs.replace(GREEDY, n=2)

    async def generate(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        stream = engine.submit(prompt_token_ids=prompt, params=GREEDY)
        return [token async for update in stream for token in update.token_ids]

    async def heard(deltas: AsyncIterator[TextDelta]) -> list[str]:
        texts = ["", ""]
        async for delta in deltas:
            texts[delta.index] += delta.text
        return texts

    async def scene() -> None:
        async with AsyncEngine.start(str(checkpoint.path), **FLAGS) as engine:
            found = await asyncio.gather(*(generate(engine, prompt) for prompt in asked))
            assert found == [greedy(checkpoint, prompt, 8) for prompt in asked]
            tokenizer = engine.tokenizer
            talk = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
            ways = (engine.generate("hello", two), engine.generate(talk, GREEDY), engine.chat("hi", two))
            hello, given, chat = await asyncio.gather(*map(heard, ways))
            assert hello == [tokenizer.decode(greedy(checkpoint, tokenizer.encode("hello"), 8))] * 2
            assert chat == given[:1] * 2 == [tokenizer.decode(greedy(checkpoint, talk, 8))] * 2
            await engine.sleep()
            assert tokenizer._backend._whole is None, "a tokenizer rests with the weights"
            await engine.wake_up()
            assert await heard(engine.chat("hi", two)) == chat
            async with contextlib.aclosing(engine.generate("hello", endless)) as deltas:
                await anext(deltas)
            cancelled = engine.generate("hello", endless)
            await anext(cancelled)
            waiting = asyncio.ensure_future(heard(cancelled))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            with pytest.raises(RequestTooLarge):
                await heard(engine.generate([5] * 5000))
            async with asyncio.timeout(HANGS_S):
                while engine.link.num_requests:  # the engine has heard of both
                    await asyncio.sleep(0.01)

    asyncio.run(scene())


@pytest.mark.long
def test_out_of_memory_in_a_forward_costs_only_that_steps_requests(
    checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.launch=memory@4")

    async def scene() -> None:
        async with AsyncEngine.start(str(checkpoint.path), **FLAGS) as engine:
            (*_, hit) = [update async for update in engine.submit(prompt_token_ids=[5, 6], params=GREEDY)]
            assert hit.failure is not None
            assert hit.failure.code == "out_of_memory"
            tokens = [
                token
                async for update in engine.submit(prompt_token_ids=[5, 6], params=GREEDY)
                for token in update.token_ids
            ]
            assert tokens == greedy(checkpoint, [5, 6], 8)

    asyncio.run(scene())


def test_a_checkpoint_that_cannot_be_served_fails_the_start_with_its_reason(checkpoint: Tiny) -> None:
    async def scene() -> None:
        async with AsyncEngine.start(str(checkpoint.path) + "-gone", **FLAGS):
            pass

    with pytest.raises(ModelError):
        asyncio.run(scene())


@pytest.mark.long
def test_an_engine_killed_while_it_decodes_a_real_model_tells_its_client(
    checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.launch=kill@4")

    async def scene() -> None:
        async with AsyncEngine.start(str(checkpoint.path), **FLAGS) as engine:
            async with asyncio.timeout(HANGS_S):
                (first, *_, last) = [update async for update in engine.submit(prompt_token_ids=[5, 6], params=GREEDY)]
            assert first.token_ids
            assert last.failure is not None
            assert last.failure.code == "engine_dead"

    asyncio.run(scene())
