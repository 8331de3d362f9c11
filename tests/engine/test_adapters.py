"""Adapters of one engine: tokens are those of merged weights, whatever else is in the batch, and slots come and go."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.base import fault
from forebay.base.errors import Conflict, InvalidRequest, ModelError, NotFound
from forebay.engine.channel import Channel
from forebay.engine.client.llm import LLM
from forebay.engine.frames import AddRequest, LoadAdapter, ToEngine, UnloadAdapter
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.loop import EngineLoop
from forebay.requests.sampling_params import SamplingParams
from tests.deadlines import NEVER_S, wait_until
from tests.engine.adapters import make_adapter, merged
from tests.kernels import NATIVE
from tests.models.tiny import Tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 13, 17, 21, 25, 29], [3, 4], [90, 80, 70, 60, 50, 40, 30, 20, 10, 11, 12, 13, 14, 15, 16, 17]]
FLAGS = {
    "dtype": "float32",
    "chunked_prefill_size": 5,
    "page_size": 4,
    "context_length": 64,
    "kv_cache_bytes": "4MiB",
    "max_running_requests": 8,
    "kernels": NATIVE,
}


@pytest.fixture(scope="module")
def adapters(checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    ranks = {"one": 4, "two": 7}
    return {
        name: make_adapter(checkpoint.path, root / name, seed=seed, rank=rank)
        for seed, (name, rank) in enumerate(ranks.items())
    }


@pytest.fixture(scope="module")
def right(checkpoint: Tiny, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """The tokens of the base ("") and of checkpoints with an adapter merged into them, of engines without adapters."""
    root, found = tmp_path_factory.mktemp("merged"), {}
    for name, path in {"": None, **adapters}.items():
        model = checkpoint.path if path is None else merged(checkpoint.path, path, root / name)
        with LLM(str(model), **FLAGS) as llm:
            found[name] = tokens_of(llm)
    assert len({str(tokens) for tokens in found.values()}) == 3, "an adapter that changes nothing shows nothing"
    return found


@pytest.fixture
def llm(checkpoint: Tiny, adapters: dict[str, Path]) -> Iterator[LLM]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with LLM(str(checkpoint.path), **FLAGS, enable_lora=True, lora_modules=modules, max_loras=2) as made:
        yield made


def tokens_of(llm: LLM, lora: str = "") -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, lora=lora)]


def test_each_adapter_gives_the_tokens_of_its_merged_checkpoint_and_the_base_its_own(llm, right):
    for _ in range(2):  # the second time prompts come from the prefix cache, each from its own
        for name in ("one", "", "two"):
            assert tokens_of(llm, name) == right[name], name or "base"


def test_requests_of_all_adapters_in_one_batch_have_the_tokens_that_each_has_alone(llm, right):
    core, wanted = llm._core, [(name, prompt) for prompt in PROMPTS for name in ("two", "", "one")]
    assert run(core, wanted) == [right[name][PROMPTS.index(prompt)] for name, prompt in wanted]


def run(core: EngineCore, wanted: list[tuple[str, list[int]]]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for number, (name, prompt) in enumerate(wanted, start=1000):
        found[number] = []
        frame = AddRequest(request_id=number, prompt_token_ids=prompt, params=GREEDY.with_seed(), adapter=name)
        assert core.add(frame) == []
    while not core.idle:
        for update in core.step():
            assert update.failure is None
            found[update.request_id] += update.token_ids
    return list(found.values())


def test_a_request_for_a_name_that_is_not_loaded_is_refused_with_those_that_are(llm):
    (refused,) = llm._core.add(AddRequest(request_id=1, prompt_token_ids=[1], params=GREEDY, adapter="three"))
    assert (refused.failure.kind, refused.failure.code) == ("NotFound", "model_not_found")
    assert "one, two" in refused.failure.message


def test_a_slot_is_used_again_and_nothing_of_the_adapter_before_is_left(llm, right, adapters, checkpoint):
    assert tokens_of(llm, "one") == right["one"]
    with pytest.raises(Conflict, match="all 2 slots"):
        llm.load_adapter("three", str(adapters["two"]))
    llm.unload_adapter("one")
    with pytest.raises(NotFound, match="loaded are: two"):
        llm.generate([[1, 2]], GREEDY, lora="one")
    llm.load_adapter("one", str(adapters["two"]))  # another under the same name
    assert tokens_of(llm, "one") == right["two"]
    assert tokens_of(llm) == right[""]


def test_a_load_that_fails_keeps_no_slot(llm, adapters, tmp_path):
    llm.unload_adapter("two")
    with pytest.raises(ModelError):
        llm.load_adapter("bad", str(tmp_path / "nothing"))
    llm.load_adapter("two", str(adapters["two"]))


def test_loads_and_unloads_go_on_between_the_steps_of_others(llm, right, adapters):
    core = llm._core
    loader, answers = core.adapters, {}
    assert (
        core.add(AddRequest(request_id=1, prompt_token_ids=PROMPTS[0], params=GREEDY.with_seed(), adapter="one")) == []
    )
    loader.handle(UnloadAdapter(serial=1, name="one"))
    loader.handle(LoadAdapter(serial=2, name="two", path=str(adapters["one"]), replace=False))
    tokens: list[int] = []

    def turn() -> bool:
        for update in core.step():
            assert update.failure is None
            tokens.extend(update.token_ids)
        loader.advance()
        answers.update(loader.take_answers())
        return core.idle and len(answers) == 2

    wait_until(turn)
    assert tokens == right["one"][0], "its adapter was there until its end"
    assert answers[1] is None
    assert answers[2].code == "adapter_loaded"
    loader.handle(LoadAdapter(serial=3, name="two", path=str(adapters["one"]), replace=True))
    wait_until(lambda: loader.advance() or not loader.busy)
    assert loader.take_answers() == [(3, None)]
    assert tokens_of(llm, "two") == right["one"]


def test_replacing_the_one_adapter_waits_for_its_requests_and_refuses_others_meanwhile(
    checkpoint, right, adapters, caplog
):
    caplog.set_level("INFO", "forebay")
    flags = {**FLAGS, "enable_lora": True, "lora_modules": [f"one={adapters['one']}"], "max_loras": 1}
    with LLM(str(checkpoint.path), **flags) as llm:
        core, loader, answers, tokens = llm._core, llm._core.adapters, {}, []
        loader.handle(LoadAdapter(serial=1, name="one", path=str(checkpoint.path), replace=True))
        wait_until(lambda: loader.advance() or not loader.busy)
        ((_, failure),) = loader.take_answers()
        assert failure.code == "invalid_adapter"
        assert any(line.startswith("adapter_refused reason=") for line in caplog.messages)
        assert tokens_of(llm, "one") == right["one"], "files that are no adapter replace nothing"
        asked = AddRequest(request_id=1, prompt_token_ids=PROMPTS[0], params=GREEDY.with_seed(), adapter="one")
        assert core.add(asked) == []
        loader.handle(LoadAdapter(serial=2, name="one", path=str(adapters["two"]), replace=True))
        refused = []

        def turn() -> bool:
            for update in core.step():
                tokens.extend(update.token_ids)
            loader.advance()
            answers.update(loader.take_answers())
            if not core.idle and not refused and core.scheduler.pools.adapters.draining:
                (update,) = core.add(msgspec.structs.replace(asked, request_id=2))
                refused.append(update.failure.code)
                assert [each.name for each in loader.report] == ["one"]
            return core.idle and bool(answers)

        wait_until(turn)
        assert (answers, refused, tokens) == ({2: None}, ["adapter_loading"], right["one"][0])
        assert tokens_of(llm, "one") == right["two"]
        loader.handle(LoadAdapter(serial=3, name="one", path=str(adapters["one"]), replace=True))
        wait_until(lambda: loader.advance() or not loader.busy)
        assert loader.take_answers() == [(3, None)]
        assert tokens_of(llm, "one") == right["one"], "without requests it is replaced at once"


def test_an_unload_answers_late_where_requests_go_on(llm):
    core = llm._core
    core.add(AddRequest(request_id=1, prompt_token_ids=PROMPTS[0], params=GREEDY.with_seed(), adapter="one"))
    core.adapters.handle(UnloadAdapter(serial=1, name="one", timeout_s=0.0))
    core.adapters.advance()
    ((serial, failure),) = core.adapters.take_answers()
    assert (serial, failure.code) == (1, "adapter_draining")
    core.abort(1)
    assert core.scheduler.pools.adapters.slots.num_free == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("given_up", [False, True], ids=["unloaded", "and a load given up"])
def test_unload_of_a_draining_adapter_waits_as_the_first_one(llm, adapters, given_up):
    core, loader = llm._core, llm._core.adapters
    core.add(AddRequest(request_id=1, prompt_token_ids=PROMPTS[0], params=GREEDY.with_seed(), adapter="one"))
    loader.handle(UnloadAdapter(serial=1, name="one", timeout_s=NEVER_S))
    if given_up:
        llm.unload_adapter("two")
        loader.beside = lambda work: None  # files that are never read
        loader.handle(LoadAdapter(serial=9, name="one", path=str(adapters["one"])))
    loader.handle(UnloadAdapter(serial=2, name="one", timeout_s=NEVER_S))
    loader.handle(UnloadAdapter(serial=3, name="one", timeout_s=0.0))
    answers = dict(loader.take_answers())
    assert answers.pop(9).code == "adapter_unloaded" if given_up else 9 not in answers
    assert [(serial, failure.code) for serial, failure in answers.items()] == [(3, "adapter_draining")]
    core.abort(1)
    loader.advance()
    assert loader.take_answers() == [(1, None), (2, None)]
    loader.handle(UnloadAdapter(serial=4, name="one"))
    ((serial, failure),) = loader.take_answers()
    assert (serial, failure.code) == (4, "model_not_found")


def test_adapters_are_there_after_a_sleep_and_after_an_update_of_the_weights(llm, right, checkpoint):
    llm.sleep()
    llm.wake_up()
    assert tokens_of(llm, "one") == right["one"]
    llm.update_weights_from_disk(str(checkpoint.path))
    assert tokens_of(llm, "two") == right["two"]
    assert tokens_of(llm) == right[""]


def test_adapters_are_there_after_an_update_that_failed(llm, right, checkpoint, tmp_path):
    other = merged(checkpoint.path, make_adapter(checkpoint.path, tmp_path / "more", seed=7), tmp_path / "other")
    fault.arm("engine.load_again", at=9)
    try:
        with pytest.raises(RuntimeError, match="injected"):
            llm.update_weights_from_disk(str(other))
    finally:
        fault.disarm()
    for name in ("one", ""):
        assert tokens_of(llm, name) == right[name], name or "base"


def begin_load(llm, path, *, until) -> None:
    """Begin to load an adapter of the name `late`, and go on until something is true of the loader."""
    loader = llm._core.adapters
    loader.handle(LoadAdapter(serial=1, name="late", path=str(path)))
    wait_until(lambda: until(loader) or loader.advance())


def end_load(llm) -> None:
    loader = llm._core.adapters
    wait_until(lambda: not loader.busy or loader.advance())
    assert loader.take_answers() == [(1, None)]


def test_a_load_that_is_half_copied_when_the_engine_sleeps_is_whole_when_it_is_there(llm, right, adapters, monkeypatch):
    llm.unload_adapter("two")
    monkeypatch.setattr("forebay.engine.lifecycle.adapters.COPY_S", -1.0)  # a pair at a time
    begin_load(llm, adapters["two"], until=lambda loader: loader._loads[0].copying is not None)
    llm.sleep()
    llm.wake_up()
    end_load(llm)
    assert tokens_of(llm, "late") == right["two"]


def test_a_load_waits_while_the_weights_are_released(llm, right, adapters):
    llm.unload_adapter("two")
    llm.sleep()
    with pytest.raises(Conflict, match="wake the engine"):
        llm.load_adapter("now", str(adapters["two"]))
    begin_load(llm, adapters["two"], until=lambda loader: not loader._loads[0].found.empty())
    llm._core.adapters.advance()
    assert llm._core.adapters._loads[0].copying is None
    llm.wake_up()
    end_load(llm)
    assert tokens_of(llm, "late") == right["two"]


def test_loop_waits_for_a_load_by_its_signal_and_not_by_the_clock(llm, right, adapters):
    llm.unload_adapter("two")
    ours, theirs = socket.socketpair()
    channel = Channel(ours, ToEngine)
    loop, loader, reads = EngineLoop(llm._core, channel), llm._core.adapters, []
    loader.beside = reads.append
    loop._idle_work = False
    llm.sleep()
    with theirs:
        loader.handle(LoadAdapter(serial=1, name="late", path=str(adapters["two"])))
        assert loop._patience_s() is None, "nothing is read yet"
        threading.Thread(target=reads.pop()).start()
        loop.turn()  # would never end without the signal
        assert loop._patience_s() is None, "there are no weights to write to"
        llm.wake_up()
        assert loop._patience_s() == 0.0
        while loader.busy:
            loop.turn()
        assert tokens_of(llm, "late") == right["two"]
        llm._core.add(AddRequest(request_id=1, prompt_token_ids=[1], params=GREEDY.with_seed(), adapter="late"))
        loader.handle(UnloadAdapter(serial=2, name="late", timeout_s=NEVER_S))
        assert 0.0 < loader.patience_s() <= NEVER_S
    channel.close()


def test_an_unload_gives_up_a_load_of_its_name(llm, adapters):
    loader = llm._core.adapters
    llm.unload_adapter("two")
    loader.beside = lambda work: None  # files that are never read
    loader.handle(LoadAdapter(serial=1, name="late", path=str(adapters["two"])))
    loader.handle(UnloadAdapter(serial=2, name="late"))
    answers = dict(loader.take_answers())
    assert (answers[1].code, answers[2]) == ("adapter_unloaded", None)
    assert not loader.busy
    assert llm._core.scheduler.pools.adapters.slots.num_free == 1


def test_an_unload_of_an_adapter_without_requests_is_done_at_once_and_logged(llm, caplog):
    caplog.set_level("INFO")
    llm._core.adapters.handle(UnloadAdapter(serial=1, name="one", timeout_s=0.0))
    assert llm._core.adapters.take_answers() == [(1, None)]
    assert "adapter_unloading name=one" in caplog.text


def test_no_thread_for_a_load_is_an_error_of_that_load(llm, adapters):
    def refuse(work):
        raise RuntimeError("can't start new thread")

    loader = llm._core.adapters
    llm.unload_adapter("two")
    loader.beside = refuse
    loader.handle(LoadAdapter(serial=1, name="late", path=str(adapters["two"])))
    ((serial, failure),) = loader.take_answers()
    assert (serial, failure.kind) == (1, "EngineError")
    assert llm._core.scheduler.pools.adapters.slots.num_free == 1


def test_a_request_for_another_load_of_a_name_is_refused(llm):
    number = llm._core.adapters.report[0].number
    wanted = AddRequest(request_id=1, prompt_token_ids=[1], params=GREEDY, adapter="one", adapter_number=number + 9)
    (refused,) = llm._core.add(wanted)
    assert refused.failure.code == "adapter_lost"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["", "a\n", "n" * 129])
def test_a_name_that_cannot_be_one_is_refused(llm, adapters, name):
    with pytest.raises(InvalidRequest):
        llm.load_adapter(name, str(adapters["two"]))


def test_a_name_that_means_the_model_is_refused(llm, adapters):
    for name in (llm.model, f"{llm.model}:one"):
        with pytest.raises(InvalidRequest, match="reserved for the model"):
            llm.load_adapter(name, str(adapters["two"]))


def test_an_adapter_whose_files_are_gone_is_dropped_when_the_engine_wakes(checkpoint, adapters, right, tmp_path):
    path = shutil.copytree(adapters["one"], tmp_path / "gone")
    modules = [f"gone={path}", f"two={adapters['two']}"]
    with LLM(str(checkpoint.path), **FLAGS, enable_lora=True, lora_modules=modules) as llm:
        core = llm._core
        core.add(AddRequest(request_id=1, prompt_token_ids=[1, 2], params=GREEDY.with_seed(), adapter="gone"))
        llm.sleep()
        shutil.rmtree(path)
        llm.wake_up()
        (lost,) = [update for update in core._take_updates() if update.request_id == 1]
        assert (lost.failure.kind, lost.failure.code) == ("Conflict", "adapter_lost")
        with pytest.raises(NotFound):
            core.scheduler.pools.adapters.named("gone")
        assert tokens_of(llm, "two") == right["two"]


def test_the_digest_of_an_adapter_is_another_where_it_is_rounded(checkpoint, adapters):
    """C31: a prefill and a decode server with slots of two dtypes would compute different bits."""
    found = set()
    for dtype in ("float32", "bfloat16"):
        with LLM(str(checkpoint.path), **FLAGS, kv_cache_dtype=dtype, enable_lora=True) as llm:
            llm.load_adapter("one", str(adapters["one"]))
            found |= {adapter.digest for adapter in llm._core.adapters.report}
    assert [len(digest) for digest in found] == [64, 64]


def test_an_engine_without_slots_says_so(checkpoint):
    with LLM(str(checkpoint.path), **FLAGS) as llm:
        assert llm._core.adapters is None
        for call in (lambda: llm.load_adapter("one", "/"), lambda: llm.unload_adapter("one")):
            with pytest.raises(Conflict, match="enable_lora=True"):
                call()
        (refused,) = llm._core.add(AddRequest(request_id=1, prompt_token_ids=[1], params=GREEDY, adapter="one"))
        assert refused.failure.code == "model_not_found"


def test_an_adapter_that_a_start_cannot_load_ends_the_start(checkpoint, tmp_path):
    with pytest.raises(ModelError, match="--lora-modules bad"):
        LLM(str(checkpoint.path), **FLAGS, enable_lora=True, lora_modules=f"bad={tmp_path / 'nothing'}")
