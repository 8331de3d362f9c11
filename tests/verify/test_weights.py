"""C19, C34: other weights for the comparison, and files of an engine before."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forebay.base.errors import ConfigError, EngineError
from forebay.cli.main import main
from forebay.config.engine_config import EngineConfig
from forebay.formats.file_array import FileArray
from forebay.formats.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsFile, checkpoint_files
from forebay.formats.safetensors_writer import Entry, write_safetensors
from forebay.formats.stored_tensor import as_float32
from forebay.memory.tier import DISK, HOST
from forebay.requests.updates import CacheReport, FinishReason, Update
from forebay.verify import run
from forebay.verify.asking import Answer, Engines
from forebay.verify.circumstances import FOLDER, PLANTED, Circumstance, Room, circumstances
from forebay.verify.questions import Question
from forebay.verify.run import Verification
from forebay.verify.weights import other_weights
from tests.verify.test_verify import QUESTION, said, small_model, tokenizer, tokenizers_read_once, without_processes

__all__ = ["small_model", "tokenizer", "tokenizers_read_once"]  # fixtures


def by_name() -> dict[str, Circumstance]:
    return {one.name: one for one in circumstances(Room([QUESTION], 16), PLANTED, 1, {})}


def floats(array: FileArray) -> np.ndarray[Any, Any]:
    return as_float32(array.read(), bfloat16=array.dtype == np.uint16)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_other_weights_have_the_same_names_and_shapes_and_other_norms(dtype: str, tmp_path: Path) -> None:
    shapes = {"a.norm.weight": (6,), "a.proj.weight": (2, 6), "b.weight": (6,), "c_layernorm.weight": (1,)}
    values = {"BF16": np.uint16(0x3F80), "F16": np.float16(1.0), "F32": np.float32(1.0)}[dtype]
    with (tmp_path / SINGLE_NAME).open("xb") as file:
        entries = {name: Entry(dtype, shape) for name, shape in shapes.items()}
        write_safetensors(file, entries, (np.full(shape, values).tobytes() for shape in shapes.values()))
    (tmp_path / "config.json").write_text("{}")
    with other_weights(tmp_path) as folder:
        assert {path.name: path.is_symlink() for path in folder.iterdir()} == {SINGLE_NAME: False, "config.json": True}
        found = SafetensorsFile(folder / SINGLE_NAME)
        after = {name: floats(found.values(name)).tolist() for name in shapes}
    assert not folder.exists()
    assert after == {
        "a.norm.weight": [1.5, 1, 1.5, 1, 1.5, 1],
        "a.proj.weight": [[1] * 6] * 2,
        "b.weight": [1] * 6,
        "c_layernorm.weight": [1.5],
    }


def test_other_weights_copy_one_file_and_link_the_others(small_model: Path, tmp_path: Path) -> None:
    for path in small_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / SINGLE_NAME).rename(tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").symlink_to(small_model / SINGLE_NAME)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with other_weights(tmp_path) as folder:
        assert [path.is_symlink() for path in checkpoint_files(folder)] == [False, True]


def test_other_weights_without_room_or_norms_are_refused(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("forebay.verify.weights._NORM", "no such name")
        with (
            pytest.raises(ConfigError, match="no weight of this model has a name of a norm"),
            other_weights(small_model),
        ):
            pass
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match=r"has no room for a copy of .*: 0 B are free"), other_weights(small_model):
        pass


def test_answer_that_restarts_drops_its_tokens_and_has_the_version_of_its_last_weights() -> None:
    answer, first = Answer(), CacheReport(cached_tokens=3)
    answer.take(Update(1, [5, 6], cache=first, weight_version=1))
    assert (answer.tokens, answer.weights, answer.restarted) == ([5, 6], 1, False)
    answer.take(Update(1, [], restarted=True))
    answer.take(Update(1, [7], cache=CacheReport(), weight_version=2))
    answer.take(Update(1, [8], FinishReason.LENGTH))
    assert (answer.tokens, answer.weights, answer.restarted) == ([7, 8], 2, True)


@pytest.mark.parametrize(("others", "num_different"), [((), 1), ((1,), 0)])
async def test_answers_of_other_weights_are_not_compared(
    others: tuple[int, ...], num_different: int, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(engines: Engines, *asked: object) -> Answer:
        return Answer([9], said([9]).logprobs, FinishReason.LENGTH, weights=1)

    config = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0).config
    monkeypatch.setattr(Engines, "_answer", answer)
    engines = Engines(config, cast(Any, None), None, [QUESTION], [said([5])], {})
    engines.other_versions.update(others)
    await engines.ask(0)
    assert len(engines.findings.differences) == num_different


@pytest.mark.parametrize(("restarted", "weights"), [(False, 2), (True, 1), (True, 2)])
def test_other_weights_count_only_for_answers_that_began_again_with_these(restarted: bool, weights: int) -> None:
    one = by_name()["other weights, and these again"]
    answer = said([5])
    answer.restarted, answer.weights = restarted, weights
    engines: Any = SimpleNamespace(all=[(0, answer)], other_versions={1})
    assert bool(one.shown(engines, Counter())) is restarted
    assert one.touched(engines, QUESTION, answer) is (restarted and weights == 2)


@pytest.mark.parametrize("tier", [DISK, HOST])
def test_files_count_only_for_prompts_that_were_found_in_them(tier: str) -> None:
    one = by_name()["from files, after a restart"]
    answer = said([5])
    answer.cache = CacheReport(cached_tokens=16, tiers={tier: 16})
    engines: Any = SimpleNamespace(all=[(0, answer)])
    assert bool(one.shown(engines, Counter())) is (tier == DISK)
    assert one.touched(engines, QUESTION, answer) is (tier == DISK)


@pytest.fixture
def verification(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> Verification:
    monkeypatch.setattr(run, "started", without_processes)
    found = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    found.baseline.alone = [said([5, 6, 7])] * 2
    return found


@pytest.mark.parametrize("changes", [True, False])
async def test_weights_are_loaded_again_once_half_of_the_requests_decode_with_others(
    changes: bool, verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    async with without_processes([verification.config], verification.questions, verification.baseline.alone) as engines:

        async def ask(number: int, *, under_way: asyncio.Event | None = None, **others: object) -> None:
            events.append("ask")
            await asyncio.sleep(0)
            other = engines.other_versions == {1} and changes
            engines.answers[number] = said([5, 6, 7], logprob=-0.75 if other else -0.5)
            engines.half_decode.set()
            if under_way:
                under_way.set()

        async def load(path: Path | str, *, are_others: bool) -> None:
            events.append("others" if are_others else "these")
            engines.other_versions |= {1} if are_others else {3}

        engines.ask, engines.load_weights = ask, load  # type: ignore[method-assign, assignment]
        play = by_name()["other weights, and these again"].play
        if not changes:
            with pytest.raises(EngineError, match="other weights change no log-probability"):
                await play(engines)
            return
        await play(engines)
    assert events == ["ask", "ask", "others", "ask", "ask", "ask", "these", "ask", "ask"]


async def test_files_are_those_that_an_engine_before_has_saved(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str, bool]] = []

    @asynccontextmanager
    async def starting(
        configs: Sequence[EngineConfig], questions: Sequence[Question], alone: Sequence[Answer] = ()
    ) -> AsyncIterator[Engines]:
        async with without_processes(configs, questions, alone) as engines:
            folder = configs[0].tiers.prefix_cache_dir
            assert Path(folder).is_dir()

            async def save() -> None:
                events.append(("save", folder, bool(alone)))

            engines.save_cache = save  # type: ignore[method-assign]
            yield engines
            events.append(("end", folder, bool(alone)))

    async def play(engines: Engines) -> None:
        events.append(("play", engines.config.tiers.prefix_cache_dir, bool(engines.alone)))

    monkeypatch.setattr(run, "started", starting)
    one = next(one for one in verification.circumstances if FOLDER in one.flags)
    await verification.first_difference(replace(one, play=play), 1)
    folder = events[0][1]
    assert events == [("save", folder, False), ("end", folder, False), ("play", folder, True), ("end", folder, True)]
    assert not Path(folder).exists()
    assert FOLDER in verification.varied


@pytest.mark.slow
@pytest.mark.parametrize("like", ["llama", "falcon_h1"])
@pytest.mark.parametrize("name", ["other weights, and these again", "from files, after a restart"])
def test_verify_weights_and_restarts_change_no_token(
    like: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / like)
    assert main(["models", "make", "--like", like, "--out", path, "--hidden-size", "64"]) == 0
    capsys.readouterr()
    assert main(["verify", path, "--requests=8", "-n=24", f"--only={name}", "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert (outcome["name"], outcome["verdict"]) == (name, "same")
