"""An engine around its steps, on each device: sleep, new weights, adapters, images, full caches, no memory left."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.resolve import resolve
from forebay.engine.client.llm import LLM
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.pools.cache_pool import CachePool
from forebay.requests.sampling_params import SamplingParams
from forebay.runtime import ModelRunner
from tests.engine.adapters import make_adapter, merged
from tests.engine.starts import PROMPTS, tokens_of, wanted
from tests.engine.test_pictures import tokens_of as tokens_behind_pictures
from tests.engine.test_sleep import SUBSETS, other_weights
from tests.integration.test_pictures import Album
from tests.kernels import NATIVE
from tests.models.tiny import Tiny, shared_tiny
from tests.models.visual import TEXT, shared_visual

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "chunked_prefill_size": 5,
    "page_size": 4,
    "context_length": 64,
    "max_running_requests": 8,
}
CPU: dict[str, Any] = {"device": "cpu", "kernels": NATIVE}
CUDA: dict[str, Any] = {"device": "cuda"}
SAVED = {"enable_memory_saver": True, "weights_cpu_backup": True}
has_saver = pytest.mark.skipif(
    importlib.util.find_spec("torch_memory_saver") is None, reason="forebay[cuda] is not installed"
)
ON_CUDA = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
# In the short tier other tests have asked a CPU the same.
ON_CPU = pytest.param(CPU, id="cpu", marks=pytest.mark.slow)
each_device = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), ON_CUDA])
each_device_slowly = pytest.mark.parametrize("device", [ON_CPU, ON_CUDA])


def core_of(path: Path, device: dict[str, Any], **flags: Any) -> EngineCore:
    return build_engine(resolve({"model": str(path), "kv_cache_bytes": "4MiB", **FLAGS, **device, **flags}).engine)[0]


@pytest.mark.parametrize(
    "device",
    [ON_CPU, pytest.param({**CUDA, **SAVED}, id="cuda", marks=[pytest.mark.gpu, has_saver])],
)
def test_c25_tokens_of_a_device_are_the_same_after_a_sleep(device: dict[str, Any]) -> None:
    core = core_of(shared_tiny("falcon_h1").path, device)
    right = tokens_of(core, PROMPTS)
    for tags in (SUBSETS[0], SUBSETS[-1]):
        core.sleeper.sleep(tags)
        core.sleeper.wake()
        assert tokens_of(core, PROMPTS) == right, tags


@each_device_slowly
def test_c25_tokens_of_a_device_are_those_of_new_weights_after_an_update(
    device: dict[str, Any], tmp_path: Path
) -> None:
    path = shared_tiny("llama").path
    core, other = core_of(path, device), other_weights(path, tmp_path / "other")
    before = tokens_of(core, PROMPTS)
    while core.in_idle_time():  # graphs are captured before
        pass
    core.sleeper.update(str(other), {})
    assert tokens_of(core, PROMPTS) == tokens_of(core_of(other, device), PROMPTS) != before


@each_device_slowly
def test_c28_tokens_of_an_adapter_on_a_device_are_those_of_merged_weights(
    device: dict[str, Any], checkpoint: Tiny, tmp_path: Path
) -> None:
    path = checkpoint.path
    adapter = make_adapter(path, tmp_path / "adapter", seed=1, rank=4)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def generated(path: Path, lora: str = "", **flags: Any) -> list[list[int]]:
        with LLM(str(path), **{**FLAGS, "kv_cache_bytes": "4MiB", **device, **flags}) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, lora=lora)]

    expected = generated(merged(path, adapter, tmp_path / "merged"))
    assert generated(path, "one", enable_lora=True, lora_modules=[f"one={adapter}"]) == expected != generated(path)


@each_device
def test_c28_tokens_behind_images_on_a_device_do_not_depend_on_other_requests(device: dict[str, Any]) -> None:
    model = shared_visual("smolvlm")
    album, text = Album(model), [list(TEXT[:7]), list(TEXT[3:9])]
    prompts = [album.prompt(text[0], (1, 2), text[1]), album.prompt(text[0], (2, 2), text[1]), album.prompt(text[1])]
    core = core_of(model.path, device)
    together = tokens_behind_pictures(core, prompts)
    assert [tokens_behind_pictures(core, [prompt])[0] for prompt in prompts] == together


@each_device
def test_caches_of_a_plan_are_there_to_the_last_page(device: dict[str, Any]) -> None:
    """On a GPU they have what its memory leaves; each byte is written, then steps run beside them."""
    path = shared_tiny("llama").path
    expected = tokens_of(core_of(path, device), PROMPTS)
    sizes = {} if device is CUDA else {"kv_cache_bytes": "4MiB"}
    core = build_engine(resolve({**FLAGS, **device, **sizes, "model": str(path)}).engine)[0]
    cache = cache_of(core)
    for table in cache.tables.values():
        for tensor in table.tensors:
            tensor.view(torch.uint8).fill_(0xA7)
    cache.reset()
    assert tokens_of(core, PROMPTS) == expected


@each_device
def test_c27_running_out_of_a_device_s_memory_ends_one_step_with_a_typed_error(
    device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, calls, run = core_of(shared_tiny("llama").path, device), [0], ModelRunner._run
    right = tokens_of(core, PROMPTS)

    def runs_out(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] != 3:
            return run(*args)
        if device is CUDA:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(ModelRunner, "_run", runs_out)
    assert core.add(wanted(9, PROMPTS[0])) == []
    failures = [update.failure for _ in iter(lambda: core.idle, True) for update in core.step() if update.failure]
    assert [failure.code for failure in failures] == ["out_of_memory"]
    assert tokens_of(core, PROMPTS) == right


def cache_of(core: EngineCore) -> CachePool:
    runner = core._runner
    inner = getattr(runner, "_runner", runner)
    assert isinstance(inner, ModelRunner)
    return inner.cache
