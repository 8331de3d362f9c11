"""Pictures in prompts: tokens are those of transformers, and equal to the bit whatever is around a request (C10, C18,
C19, C28)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.base.pixels import num_pixel_bytes
from forebay.engine.loop.core import close
from forebay.requests.pictures import Picture, digest_of
from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import BLOCK_ROWS, Engine, Result, Rig
from tests.integration.test_hybrid_tokens import scores
from tests.kernels import NATIVE
from tests.models.heads import make_headed
from tests.models.visual import TEXT, TYPES, VisualModel, shared_visual

MARK = 4  # what stands between the tiles of a picture


@dataclass(frozen=True)
class Prompt:
    """Token ids with a placeholder at each token of a picture, and the pictures."""

    ids: list[int]
    pictures: tuple[Picture, ...]


class Album:
    """Makes prompts of a model. A picture has the pixels of its number, and as many tiles as it is asked for."""

    def __init__(self, model: VisualModel) -> None:
        self.model = model

    def prompt(self, *parts: list[int] | tuple[int, int]) -> Prompt:
        """Of lists of token ids, and of pictures, each a number and its tiles."""
        ids: list[int] = []
        pictures = []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            number, tiles = part
            sizes, runs = self.model.sizes(tiles), []
            pixels = np.random.default_rng(number).bytes(num_pixel_bytes(sizes))
            for size in sizes:
                own, runs_of_tile = self.model.written(size)
                runs += [(len(ids) + 1 + start, length) for start, length in runs_of_tile]
                ids += [MARK, *own]
            grid = self.model.grid(sizes)
            digest = digest_of(pixels, grid, sizes)
            pictures.append(Picture(digest=digest, grid=grid, sizes=sizes, pixels=pixels, runs=tuple(runs)))
        return Prompt(ids, tuple(pictures))


@dataclass(frozen=True)
class Shown:
    """A rig, prompts with pictures, and what each of them gives alone in an engine of its own."""

    rig: Rig
    prompts: list[Prompt]
    params: list[SamplingParams]
    alone: list[Any]

    @classmethod
    def of(cls, rig: Rig, prompts: list[Prompt], params: list[SamplingParams]) -> Shown:
        alone = [scores(run(rig.engine(), [prompt], [own]))[0] for prompt, own in zip(prompts, params, strict=True)]
        return cls(rig, prompts, params, alone)

    def check(self, engine: Engine, **options: Any) -> list[Result]:
        results = run(engine, self.prompts, self.params, **options)
        assert scores(results) == self.alone
        return results


def run(engine: Engine, prompts: list[Prompt], params: list[SamplingParams], **options: Any) -> list[Result]:
    pictures = [prompt.pictures for prompt in prompts]
    return engine.run([prompt.ids for prompt in prompts], params, pictures=pictures, **options)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2)


# Of types whose encoder is another's but for its activation, norms and positions.
OF_OTHERS = {"kimi_k25", "muse_glimmer", "qwen2_vl"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in OF_OTHERS)) for name in TYPES]
)
def model(request: pytest.FixtureRequest) -> VisualModel:
    return shared_visual(request.param)


@pytest.fixture(scope="module")
def rig(model: VisualModel) -> Rig:
    made = Rig(model.path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(scope="module")
def shown(model: VisualModel, rig: Rig) -> Shown:
    """Prompts with the same text and different pictures, with shared beginnings, and text alone."""
    album, rng = Album(model), random.Random(0)
    trunk = [rng.choice(TEXT) for _ in range(20)]

    def own() -> list[int]:
        return [rng.choice(TEXT) for _ in range(rng.randrange(1, 20))]

    same = own()
    prompts = [
        album.prompt(trunk, (1, 1), same),
        album.prompt(trunk, (2, 1), same),
        album.prompt(trunk, (1, 1), own()),
        album.prompt(own()),
        album.prompt((3, 2), own(), (1, 1), own()),
        album.prompt((3, 2), own(), (2, 1), own()),
        album.prompt(trunk, own()),
        album.prompt(trunk, (4, 5), own()),
    ]
    return Shown.of(rig, prompts, [greedy(10 + i) for i in range(len(prompts))])


@pytest.mark.quick(4)
def test_tokens_and_log_probabilities_equal_those_of_transformers(model: VisualModel, shown: Shown) -> None:
    assert check_logprobs(model, shown) > 4 * len(shown.prompts)


def check_logprobs(model: VisualModel, shown: Shown) -> int:
    """Compare with transformers, and return how many tokens were. Of a generated placeholder it would make a picture:
    answers are compared up to one."""
    num_compared = 0
    for prompt, (tokens, logprobs) in zip(shown.prompts, shown.alone, strict=True):
        stop = [*tokens, model.placeholder].index(model.placeholder)
        tiles = [tile for picture in prompt.pictures for tile in _tiles(picture)]
        wanted = model.logits([*prompt.ids, *tokens[:stop]], tiles).log_softmax(-1)
        for place, (token, found) in enumerate(zip(tokens[: stop + 1], logprobs, strict=False), len(prompt.ids) - 1):
            assert found.logprob == pytest.approx(float(wanted[place, token]), abs=1e-4)
            assert found.rank == 1
            num_compared += 1
    return num_compared


@pytest.mark.slow
def test_c16_draft_layer_behind_pictures_changes_no_token(tmp_path: Path) -> None:
    """Its keys are rotated by three positions, and its guesses follow the model's streams behind a picture."""
    model, path = shared_visual("qwen4_exp-ngrams"), tmp_path / "model"
    shutil.copytree(model.path, path)
    drafting = load_file(make_headed("qwen4_exp_text", tmp_path / "head").path / "model.safetensors")
    stored = load_file(path / "model.safetensors")
    stored |= {name: values for name, values in drafting.items() if name.startswith("mtp.")}
    save_file(stored, path / "model.safetensors")
    rig = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256, draft_head=True)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    album, tokens = Album(model), list(TEXT)
    prompts = [album.prompt(tokens[:9], (number, number), tokens[9 : 12 + number]) for number in (1, 3)]
    params = [greedy(12) for _ in prompts]
    plain = scores(run(rig.engine(page_size=4), prompts, params))
    engine = rig.engine(page_size=4, width=4, chunked_prefill_size=7)
    plan = engine.core.scheduler.plan
    engine.core.scheduler.plan = lambda now, *_: plan(now, 4)  # as wide as it may be
    assert scores(run(engine, prompts, params)) == plain
    assert engine.count("draft_tokens") > 0


def _tiles(picture: Picture) -> Iterator[np.ndarray[Any, Any]]:
    at = 0
    for size in picture.sizes:
        stop = at + num_pixel_bytes([size])
        yield np.frombuffer(picture.pixels[at:stop], np.uint8).reshape(*size, 3)
        at = stop


def test_same_text_with_another_picture_gives_other_log_probabilities(shown: Shown) -> None:
    first, second = shown.prompts[:2]
    assert first.ids == second.ids
    assert shown.alone[0][1][0] != shown.alone[1][1][0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 7, 512])
def test_tokens_do_not_depend_on_pages_and_chunks(shown: Shown, page_size: int, chunk: int) -> None:
    shown.check(shown.rig.engine(page_size=page_size, chunked_prefill_size=chunk), apart=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
@pytest.mark.parametrize("layer_tokens", [0.1, 3.0, 1000.0])
def test_tokens_do_not_depend_on_slices(shown: Shown, overlap_depth: int, layer_tokens: float) -> None:
    options = {"overlap_depth": overlap_depth, "layer_tokens": layer_tokens, "chunked_prefill_size": 16}
    shown.check(shown.rig.engine(**options))


@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("apart", [0, 3, 40])
def test_prefix_hits_before_inside_and_behind_pictures(shown: Shown, page_size: int, apart: int) -> None:
    engine = shown.rig.engine(radix_cache=True, page_size=page_size, chunked_prefill_size=16, overlap_depth=1)
    for _ in range(2):
        results = shown.check(engine, apart=apart)
    cached, page_size = [result.cached_tokens for result in results], engine.core.scheduler.pools.page_size
    assert all(num >= len(prompt.ids) - 2 * page_size for num, prompt in zip(cached, shown.prompts, strict=True))


@pytest.mark.quick(1)
def test_picture_whose_tokens_are_cached_is_not_encoded_again(shown: Shown) -> None:
    engine = shown.rig.engine(radix_cache=True, page_size=1)
    shown.check(engine, apart=40)
    before = engine.count("encoded_tiles")
    shown.check(engine, apart=40)
    assert before > 0
    assert engine.count("encoded_tiles") == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_evicted_encodings_are_computed_again(shown: Shown, spare: int) -> None:
    """With room for the largest picture, and for some blocks beside it."""
    largest = max(picture.num_tokens for prompt in shown.prompts for picture in prompt.pictures)
    num_blocks = ceil(largest / BLOCK_ROWS) + spare
    engine = shown.rig.engine(num_rows_of_pictures=num_blocks * BLOCK_ROWS)
    for prompt, params, alone in zip(shown.prompts, shown.params, shown.alone, strict=True):
        assert scores(run(engine, [prompt], [params])) == [alone]
    before = engine.count("encoded_tiles")
    assert scores(run(engine, shown.prompts[:1], shown.params[:1])) == shown.alone[:1]
    assert engine.count("encoded_tiles") > before
    assert engine.count("evicted_encodings") > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("radix_cache", [False, True])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_retracted_requests_keep_their_tokens(shown: Shown, radix_cache: bool, host_bytes: int) -> None:
    options = {"radix_cache": radix_cache, "retraction_host_bytes": host_bytes, "chunked_prefill_size": 16}
    longest = max(len(its.ids) + own.max_tokens for its, own in zip(shown.prompts, shown.params, strict=True))
    num_tokens = round(1.6 * longest / 16) * 16  # of the KV cache: requests begin, and it does not last to their ends
    engine = shown.rig.engine(**options, num_tokens=num_tokens, schedule_conservativeness=0.0)
    shown.check(engine)
    assert engine.count("retractions") > 0


@pytest.mark.quick(4)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_c19_tier_gives_prompts_with_pictures_the_bits_of_a_cold_engine(
    shown: Shown, tier: str, tmp_path: Path
) -> None:
    """Pictures of a restarted engine get other ids: they come in another order."""
    of_tier: dict[str, Any] = {"host_tokens": 4096} if tier == "host" else {"disk": (tmp_path, {})}
    engine = shown.rig.engine(radix_cache=True, page_size=4, **of_tier)
    shown.check(engine)
    engine.core.scheduler.pools.cache.flush()  # of the device alone
    if tier == "disk":
        close(engine.core)
        engine = shown.rig.engine(radix_cache=True, page_size=4, **of_tier)
    for number in reversed(range(len(shown.prompts))):
        prompt = shown.prompts[number]
        (result,) = run(engine, [prompt], [shown.params[number]])
        assert scores([result]) == [shown.alone[number]]
        behind = max((at + length for picture in prompt.pictures for at, length in picture.runs), default=0)
        assert result.cached_tokens >= behind // 4 * 4, f"{result.tiers} of {behind} tokens up to the last picture's"
        engine.core.scheduler.pools.cache.flush()
        assert result.tiers.get(tier, 0) == result.cached_tokens
    close(engine.core)
