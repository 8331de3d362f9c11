"""The whole engine with a real, tiny model: in this process (`LLM`) and in one of its own (`AsyncEngine`)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest
import torch

from forebay.base.errors import ConfigError, Conflict, GenerationError, InvalidRequest, ModelError, RequestTooLarge
from forebay.engine.async_engine import AsyncEngine
from forebay.engine.llm import LLM
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


def test_an_llm_is_closed_at_the_end_of_a_with_and_says_what_it_is(checkpoint: Tiny) -> None:
    with LLM(str(checkpoint.path), **FLAGS) as llm:
        assert repr(llm) == f"LLM({checkpoint.path.name!r}, context_length={llm.info.context_length})"
    assert repr(llm) == "LLM(closed)"
    with pytest.raises(Conflict, match="closed"):
        llm.generate([1, 2, 3])


def test_a_prompt_that_can_never_fit_fails_alone_and_is_told_of_when_all_have_ended(llm: LLM, checkpoint: Tiny) -> None:
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
        LLM(str(checkpoint.path), **{setting: 1})
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


def test_an_engine_in_its_own_process_gives_the_same_tokens(checkpoint: Tiny) -> None:
    asked = prompts(1, 6)

    async def generate(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        stream = engine.submit(prompt_token_ids=prompt, params=GREEDY)
        return [token async for update in stream for token in update.token_ids]

    async def scene() -> list[list[int]]:
        async with AsyncEngine.start(str(checkpoint.path), **FLAGS) as engine:
            return list(await asyncio.gather(*(generate(engine, prompt) for prompt in asked)))

    assert asyncio.run(scene()) == [greedy(checkpoint, prompt, 8) for prompt in asked]


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


def test_an_engine_killed_while_it_decodes_a_real_model_tells_its_client(checkpoint: Tiny) -> None:
    async def scene() -> None:
        async with AsyncEngine.start(str(checkpoint.path), **FLAGS) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            stream = engine.submit(prompt_token_ids=[5, 6], params=params)
            await anext(stream)
            os.kill(engine.pid, signal.SIGKILL)
            async with asyncio.timeout(HANGS_S):
                (*_, last) = [update async for update in stream]
            assert last.failure is not None
            assert last.failure.code == "engine_dead"

    asyncio.run(scene())
