"""Memory given back and taken again, and weights that change, in one process: the same tokens or an error (C25)."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.base.errors import ConfigError, Conflict, InvalidRequest, ModelError
from forebay.config.resolve import resolve
from forebay.engine.frames import TAGS, Release, Resume, UpdateWeights
from forebay.engine.lifecycle.occupation import Occupation
from forebay.engine.lifecycle.weights import EngineWeights, GivenTensor
from forebay.engine.loop.build import _regions, build_engine
from forebay.engine.loop.core import EngineCore
from forebay.engine.stream import merge
from forebay.families import TYPES
from forebay.families.config.model_config import config_from_folder
from forebay.formats.identity import weights_digest
from forebay.pools.regions import Tag
from forebay.requests.updates import MissReason, Update
from tests.engine.starts import PROMPTS, tokens_of, wanted
from tests.kernels import NATIVE
from tests.models.assistants import make_assistant
from tests.models.eagles import make_head, make_target
from tests.models.tiny import CASES, by_tier, shared_tiny
from tests.pools.test_regions import num_resident

SUBSETS = [tags for count in (1, 2, 3) for tags in combinations(TAGS, count)]
ONE_OF_EACH = [next(case for case, (name, _) in CASES.items() if name == model_type) for model_type in TYPES]


def subsets_of(case: str) -> list[tuple[str, ...]]:
    """All of them for one type, of the others each alone but in turn, and all together."""
    return SUBSETS if case == "llama" else [SUBSETS[ONE_OF_EACH.index(case) % 3], SUBSETS[-1]]


def sleeps_of(case: str) -> list[tuple[tuple[str, ...], bool]]:
    """Tags, and whether the prefix cache is kept: both for each subset of one type, of the others one in turn."""
    if case == "llama":
        return list(product(subsets_of(case), (False, True)))
    first = ONE_OF_EACH.index(case) // 3 % 2 == 0
    return list(zip(subsets_of(case), (first, not first), strict=True))


def core_of(path: Path, **flags: Any) -> EngineCore:
    asked = {"model": str(path), "dtype": "float32", "chunked_prefill_size": 5, "page_size": 4, "context_length": 64}
    asked |= {"kv_cache_bytes": "4MiB", "max_running_requests": 8, "kernels": NATIVE}
    return build_engine(resolve({**asked, **flags}).engine)[0]


def other_weights(path: Path, folder: Path, *, kept: str = "no tensor") -> Path:
    """A checkpoint of the same shapes, with the same values in tensors whose names end with `kept`."""
    shutil.copytree(path, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {name for name, value in tensors.items() if value.is_floating_point() and not name.endswith(kept)}
        save_file({name: value * 0.75 if name in changed else value for name, value in tensors.items()}, file)
    return folder


def poison(core: EngineCore) -> None:
    """Whatever is released holds something else when it is taken again."""
    memory = core.sleeper._memory
    assert isinstance(memory, Occupation)
    for tag in core.sleeper.state.released:
        for region in memory._regions._mapped[tag]:
            size = min(region.num_bytes, 1 << 20)
            region.memory[:size] = b"\xa7" * size


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", by_tier(ONE_OF_EACH))
def test_c25_tokens_are_the_same_after_a_sleep_of_any_tags_and_those_of_new_weights_after_an_update(
    case: str, tmp_path: Path
) -> None:
    tiny = shared_tiny(case)
    page_size = math.lcm(4, config_from_folder(tiny.path).page_multiple)
    core = core_of(tiny.path, page_size=page_size)
    right = tokens_of(core, PROMPTS)
    while core.in_idle_time():  # graphs are captured before
        pass
    assert tokens_of(core, PROMPTS) == right
    for tags, keep in sleeps_of(case):
        core.sleeper.keep_prefix_cache = keep
        core.sleeper.sleep(tags)
        assert (core.sleeper.state.kept_bytes > 0) is (keep and "kv_cache" in tags)
        poison(core)
        core.sleeper.wake()
        assert tokens_of(core, PROMPTS) == right, (tags, keep)
    other = other_weights(tiny.path, tmp_path / "other")
    try:
        core.sleeper.update(str(other), {})
    except InvalidRequest as error:
        assert "single numbers" in error.message  # noqa: PT017
        assert tokens_of(core, PROMPTS) == right
        return
    updated = tokens_of(core_of(other, page_size=page_size), PROMPTS)
    assert tokens_of(core, PROMPTS) == updated
    assert core.sleeper.state.weights == weights_digest(other)
    core.sleeper.sleep()
    core.sleeper.wake()
    assert tokens_of(core, PROMPTS) == updated


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(shared_tiny("llama").path, tmp_path_factory.mktemp("llama") / "model"))


def first_cache(core: EngineCore, prompt: list[int]) -> Any:
    core.add(wanted(9, prompt))
    reports = []
    while not core.idle:
        reports += [update for update in core.step() if update.cache]
    return reports[0]


def test_a_prompt_that_was_cached_before_a_release_misses_because_of_that(llama: Path) -> None:
    core = core_of(llama)
    tokens_of(core, PROMPTS)
    assert first_cache(core, PROMPTS[2]).cache.cached_tokens == 12
    core.sleeper.sleep(["kv_cache"])
    assert [pool.cached for pool in core.scheduler.state(0).pools] == [0, 0]
    core.scheduler.flush_cache()
    core.sleeper.wake()
    report = first_cache(core, PROMPTS[2]).cache
    assert (report.cached_tokens, report.miss_reason) == (0, MissReason.RELEASED)
    core.sleeper.sleep(["weights", "cuda_graph"])
    core.sleeper.wake()
    assert first_cache(core, PROMPTS[2]).cache.cached_tokens == 12  # the caches were not released


def test_of_the_prefix_cache_as_much_outlasts_a_release_as_the_host_has_room_for_and_no_update(llama: Path) -> None:
    core = core_of(llama, keep_prefix_cache=True)
    right = tokens_of(core, PROMPTS)

    def found_after_a_sleep() -> tuple[int, MissReason]:
        core.sleeper.sleep(["kv_cache"])
        poison(core)
        core.sleeper.wake()
        report = first_cache(core, PROMPTS[2]).cache
        return report.cached_tokens, report.miss_reason

    assert found_after_a_sleep() == (12, MissReason.NONE)
    assert tokens_of(core, PROMPTS) == right
    offloaded = core.scheduler.memory.host_copies
    offloaded._config = replace(offloaded._config, retraction_host_bytes=offloaded.bytes_of({"kv": 2}))
    core.sleeper.sleep(["kv_cache"])
    assert core.sleeper.state.kept_tokens == 8
    assert core.sleeper.state.kept_bytes == offloaded.room
    poison(core)
    core.sleeper.wake()
    reports = [first_cache(core, prompt).cache for prompt in PROMPTS]
    assert MissReason.RELEASED in [report.miss_reason for report in reports]
    core.sleeper.sleep(["kv_cache"])
    core.sleeper.update(str(llama), {})
    assert core.sleeper.state.kept_bytes == 0
    core.sleeper.wake()
    assert first_cache(core, PROMPTS[2]).cache.cached_tokens == 0
    assert tokens_of(core, PROMPTS) == right


def weights_in(core: EngineCore) -> list[str]:
    regions = core.sleeper._memory._regions._mapped[Tag.WEIGHTS]
    return [hashlib.sha256(region.memory).hexdigest() for region in regions]


@pytest.mark.quick(1)
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "FROZEN_KV_MTP"])
def test_draft_model_sleeps_wakes_and_updates_with_the_model(algorithm: str, tmp_path: Path) -> None:
    target = shared_tiny("gemma4_text" if algorithm == "FROZEN_KV_MTP" else "llama").path
    draft = tmp_path / "draft"
    match algorithm:
        case "STANDALONE":
            draft = target  # which is always right
        case "EAGLE":
            target = tmp_path / "target"
            target.mkdir()
            make_head(make_target(target), draft, third=False)
        case "FROZEN_KV_MTP":
            make_assistant(draft)
    core = core_of(target, speculative_algorithm=algorithm, speculative_draft_model_path=str(draft))
    right, loaded = tokens_of(core, PROMPTS), weights_in(core)
    core.sleeper.sleep()
    poison(core)
    assert weights_in(core) != loaded
    core.sleeper.wake()
    assert weights_in(core) == loaded
    assert tokens_of(core, PROMPTS) == right
    if algorithm == "STANDALONE":
        core.sleeper.update(str(other_weights(target, tmp_path / "other")), {})
        before = dict(core.scheduler.state(0.0).counters)
        assert tokens_of(core, PROMPTS) == tokens_of(core_of(tmp_path / "other"), PROMPTS)
        after = core.scheduler.state(0.0).counters
        drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
        assert 0 <= accepted <= drafted
        assert first_cache(core, PROMPTS[2]).weight_version == 1


def test_each_tag_is_of_pages_that_no_other_has(llama: Path) -> None:
    core = core_of(llama)
    tokens_of(core, PROMPTS)
    mapped = core.sleeper._memory._regions._mapped

    def resident() -> dict[Tag, int]:
        return {tag: sum(num_resident(memory_of(region)) for region in mapped[tag]) for tag in Tag}

    for tag in Tag:
        before = resident()
        assert before[tag] > 0
        core.sleeper._memory._regions.release(tag)
        assert resident() == before | {tag: 0}


def memory_of(region: Any) -> torch.Tensor:
    return torch.frombuffer(region.memory, dtype=torch.uint8)


def test_where_graphs_own_what_they_compute_in_they_are_dropped_and_captured_anew(llama: Path) -> None:
    core = core_of(llama)
    right = tokens_of(core, PROMPTS)
    runner = core.sleeper._memory._runner
    assert runner.decode.captured.graphs
    runner.drop_graphs()
    assert not runner.decode.captured.graphs
    assert tokens_of(core, PROMPTS) == right
    assert runner.decode.captured.graphs


def test_a_memory_saver_that_is_not_installed_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    config = replace(resolve({"model": str(llama)}).engine, device="cuda", enable_memory_saver=True)
    with pytest.raises(ConfigError, match=r"--enable-memory-saver: .* install forebay\[cuda\]"):
        _regions(config)


def test_some_tensors_from_memory_are_used_and_outlast_a_sleep(llama: Path, tmp_path: Path) -> None:
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    given = {name: GivenTensor(value) for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    half = dict(list(given.items())[::2])
    core.sleeper.update(None, half)
    halfway = tokens_of(core, PROMPTS)
    core.sleeper.update(None, {name: value for name, value in given.items() if name not in half})
    other = tokens_of(core_of(path), PROMPTS)
    assert tokens_of(core, PROMPTS) == other != halfway
    core.sleeper.sleep()
    core.sleeper.wake()
    assert tokens_of(core, PROMPTS) == other
    assert core.scheduler.queues.weight_version == 2
    assert first_cache(core, PROMPTS[2]).weight_version == 2


def test_weights_of_other_names_shapes_or_types_are_refused_and_nothing_changes(llama: Path) -> None:
    core = core_of(llama)
    right = tokens_of(core, PROMPTS)
    given = {
        "model.norm.weight": GivenTensor(torch.zeros(7)),
        "model.layers.0.mlp.up_proj.weight": GivenTensor(torch.zeros(80, 48, dtype=torch.bfloat16)),
        "model.extra": GivenTensor(torch.zeros(1)),
    }
    with pytest.raises(InvalidRequest) as refused:
        core.sleeper.update(None, given)
    assert refused.value.message.endswith(
        "3 weights are others than are loaded: model.extra is F32 [1] instead of not there, "
        "model.layers.0.mlp.up_proj.weight is BF16 [80, 48] instead of F32 [80, 48], "
        "model.norm.weight is F32 [7] instead of F32 [48]"
    )
    assert tokens_of(core, PROMPTS) == right
    assert core.scheduler.queues.weight_version == 0


def test_an_update_that_fails_in_the_middle_leaves_the_old_weights(llama: Path, tmp_path: Path) -> None:
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    right = tokens_of(core, PROMPTS)

    class Torn(GivenTensor):
        def pieces(self) -> Any:
            raise OSError("the disk is gone")

    torn = {"model.norm.weight": Torn(torch.zeros(48))}  # the last that is read
    with pytest.raises(OSError, match="the disk is gone"):
        core.sleeper._memory.update(str(path), torn, lambda: None)
    assert tokens_of(core, PROMPTS) == right


def test_update_file_shortened_while_it_is_read_keeps_the_old_weights(llama: Path, tmp_path: Path) -> None:
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    right = tokens_of(core, PROMPTS)
    (file,) = path.glob("*.safetensors")
    loaded = iter(range(1000))

    def shorten() -> None:
        if next(loaded) == 3:
            os.truncate(file, 4096)

    with pytest.raises(ModelError, match="another program has shortened it"):
        core.sleeper._memory.update(str(path), {}, shorten)
    assert tokens_of(core, PROMPTS) == right


def test_update_file_rewritten_in_place_while_it_is_read_keeps_the_old_weights(llama: Path, tmp_path: Path) -> None:
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    right = tokens_of(core, PROMPTS)
    (file,) = path.glob("*.safetensors")

    with pytest.raises(ModelError, match=r"model.safetensors changed while the weights were loaded: try again"):
        core.sleeper._memory.update(str(path), {}, lambda: os.utime(file, ns=(0, 1)))
    assert tokens_of(core, PROMPTS) == right
    os.utime(file)
    core.sleeper.update(str(path), {})
    assert tokens_of(core, PROMPTS) != right


def test_start_file_changed_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copytree(shared_tiny("llama").path, tmp_path / "model"))
    (file,) = path.glob("*.safetensors")
    build = EngineWeights._build

    def changing(self: EngineWeights, *args: Any) -> Any:
        os.utime(file, ns=(0, 1))
        return build(self, *args)

    monkeypatch.setattr(EngineWeights, "_build", changing)
    with pytest.raises(ModelError, match="changed while the weights were loaded: start again"):
        core_of(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_update_weights_not_finite_are_refused_by_name_and_the_old_ones_stay(
    llama: Path, tmp_path: Path, number: float
) -> None:
    """C30: one number in one tensor, in a file and from memory."""
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    right = tokens_of(core, PROMPTS)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][-1, -1] = number
    save_file(tensors, file)
    for source, given in ((str(path), {}), (None, {name: GivenTensor(tensors[name])})):
        with pytest.raises(ModelError, match=rf"{name} has values that are not finite"):
            core.sleeper._memory.update(source, given, lambda: None)
        assert tokens_of(core, PROMPTS) == right
    with pytest.raises(InvalidRequest, match=rf"{name} has values that are not finite") as refused:
        core.sleeper.update(str(path), {})
    assert (refused.value.code, refused.value.status) == ("invalid_model", 400)
    with pytest.raises(ModelError, match=rf"{name} has values that are not finite"):
        core_of(path)


def test_what_cannot_be_had_again_is_not_released_and_a_failed_wake_stays_asleep(tmp_path: Path) -> None:
    path = Path(shutil.copytree(shared_tiny("llama").path, tmp_path / "model"))
    core = core_of(path)
    right = tokens_of(core, PROMPTS)
    (file,) = path.glob("*.safetensors")
    whole = file.read_bytes()
    core.sleeper.sleep()
    file.unlink()
    with pytest.raises(Conflict, match="the weights cannot be read again"):
        core.sleeper.wake()
    assert core.sleeper.state.phase == "asleep"
    assert core.sleeper.state.released == list(TAGS)
    file.write_bytes(whole)
    with pytest.raises(Conflict, match="changed since the weights were loaded"):
        core.sleeper.wake()
    os.utime(file, ns=(core.sleeper._memory._weights._files[0].modified_ns,) * 2)
    core.sleeper.wake()
    assert tokens_of(core, PROMPTS) == right
    file.unlink()
    with pytest.raises(Conflict, match="the weights cannot be read again"):
        core.sleeper.sleep()
    assert core.sleeper.state.phase == "serving"
    assert tokens_of(core, PROMPTS) == right


def told(core: EngineCore, frame: Release | Resume) -> str:
    core.sleeper.handle(frame)
    while not (answers := core.sleeper.transitions.take_answers()):
        core.step()
    ((serial, failure),) = answers
    assert serial == frame.serial
    return failure.message if failure else ""


def test_what_makes_no_sense_is_refused_with_the_reason(llama: Path) -> None:
    core = core_of(llama)
    assert told(core, Resume(serial=1, tags=["weights"])) == "weights: not released"
    assert told(core, Release(serial=2, tags=["weight"])).startswith("tags ['weight']: there are kv_cache, weights")
    assert told(core, Release(serial=3, tags=["weights"], mode="later")).startswith("mode 'later': use wait, retract")
    assert told(core, Release(serial=4, tags=["weights"])) == ""
    assert told(core, Release(serial=5, tags=["weights", "kv_cache"])) == "weights: released already"
    assert told(core, Release(serial=6, tags=["kv_cache"])) == ""
    assert told(core, Resume(serial=7, tags=["kv_cache"])) == ""
    assert core.sleeper.state.released == ["weights"]
    assert told(core, Release(serial=8, tags=[])) == ""
    assert told(core, Resume(serial=9, tags=["weights"])) == ""
    assert core.sleeper.phase == "asleep"  # paused
    assert told(core, Resume(serial=10, tags=[])) == ""
    assert core.sleeper.phase == "serving"
    assert told(core, Resume(serial=11, tags=[])) == "nothing: not released"


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", ["wait", "retract", "abort"])
@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_run_finish_go_on_later_or_end_as_the_mode_says(llama: Path, mode: str, depth: int) -> None:
    core = core_of(llama, overlap_depth=depth)
    right = tokens_of(core, PROMPTS)
    tokens: dict[int, list[int]] = {request_id: [] for request_id in (1, 2, 3)}
    ended: dict[int, str] = {}

    def hear(updates: list[Update]) -> None:
        for update in updates:
            tokens[update.request_id] += update.token_ids
            if update.finish:
                ended[update.request_id] = update.failure.code if update.failure else update.finish

    for request_id, prompt in enumerate(PROMPTS, start=1):
        core.add(wanted(request_id, prompt))
    for _ in range(6):
        hear(core.step())
    core.sleeper.handle(Release(serial=1, tags=list(TAGS), mode=mode))
    assert core.sleeper.phase == "draining"
    core.sleeper.handle(Release(serial=2, tags=["weights"]))
    assert [failure.code for _, failure in core.sleeper.transitions.take_answers() if failure] == ["in_transition"]
    while core.sleeper.phase == "draining":
        hear(core.step())
    assert core.sleeper.transitions.take_answers() == [(1, None)]
    assert set(ended.values()) == {"wait": {"length"}, "retract": set(), "abort": {"aborted"}}[mode]
    hear(core.step())
    poison(core)
    assert told(core, Resume(serial=3, tags=list(TAGS))) == ""
    while not core.idle:
        hear(core.step())
    if mode != "abort":
        assert list(tokens.values()) == right
    assert tokens_of(core, PROMPTS) == right


def test_weight_update_running_request_restarts_and_uses_one_version(llama: Path, tmp_path: Path) -> None:
    core, path = core_of(llama), other_weights(llama, tmp_path / "other")
    core.add(wanted(1, PROMPTS[0]))
    for _ in range(6):
        core.step()
    core.sleeper.handle(UpdateWeights(serial=1, path=str(path), mode="retract"))
    updates: list[Update] = []
    while not core.idle:
        updates += core.step()
    restarts = [i for i, update in enumerate(updates) if update.restarted]
    assert len(restarts) == 1
    again = [token for update in updates[restarts[0] :] for token in update.token_ids]
    assert again == tokens_of(core_of(path), PROMPTS[:1])[0]
    assert [update.weight_version for update in updates if update.cache] == [1]
    whole = updates[0]
    for update in updates[1:]:
        whole = merge(whole, update)
    assert whole.token_ids == again


def test_a_drain_that_takes_too_long_changes_nothing(llama: Path) -> None:
    core = core_of(llama)
    core.add(wanted(1, PROMPTS[0]))
    core.step()
    message = told(core, Release(serial=1, tags=["kv_cache"], timeout_s=0.0))
    assert message.startswith("1 requests still run after")
    assert core.sleeper.phase == "serving"
    while not core.idle:
        assert not any(update.failure for update in core.step())


def test_a_request_wakes_an_engine_that_requests_wake(llama: Path) -> None:
    core = core_of(llama, wake_on_request=True)
    right = tokens_of(core, PROMPTS)
    core.sleeper.sleep()
    assert tokens_of(core, [*PROMPTS, *PROMPTS]) == right * 2
    assert core.sleeper.phase == "serving"
    assert told(core, Release(serial=1, tags=[])) == ""
    core.add(wanted(1, PROMPTS[0]))
    for _ in range(5):
        assert core.step() == []
    assert core.sleeper.phase == "asleep"  # nobody but who paused it lets it go on


def test_c25_every_row_of_the_device_holds_its_pads_after_a_wake_whatever_lay_there(llama: Path) -> None:
    core = core_of(llama)
    tokens_of(core, PROMPTS)
    runner = core.sleeper._memory._runner
    tables = [runner.rows, *runner.cache.tables.values()]
    core.sleeper.sleep(["kv_cache"])
    poison(core)
    core.sleeper.wake()
    for table in tables:
        for name, tensor in zip(table.columns, table.tensors, strict=True):
            assert bool((tensor == table._pads[name]).all()), name


def test_c25_hot_buffers_are_empty_after_a_wake() -> None:
    """C23: and the tokens are those of before."""
    path = shared_tiny("deepseek_v32").path
    core = core_of(path, enable_hisparse=True, speculative_algorithm="off")
    before = tokens_of(core, PROMPTS)
    core.sleeper.sleep(["kv_cache"])
    poison(core)
    core.sleeper.wake()
    tiers = core.sleeper._memory._runner.cache.tiers
    for name, tensor in zip(tiers.rows.columns, tiers.rows.tensors, strict=True):
        assert bool((tensor == tiers.rows._pads[name]).all()), name
    assert tokens_of(core, PROMPTS) == before
