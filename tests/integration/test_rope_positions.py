"""M-RoPE: tokens are those of the model at the positions that transformers would compute, whatever is around a request
(C13, C16, C19, C28)."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from forebay.base.pixels import num_pixel_bytes, num_tokens
from forebay.config.engine_config import SpeculationOptions
from forebay.families.base.rope import RopeSections
from forebay.layers.context import PictureRows
from forebay.requests.pictures import Picture, digest_of
from forebay.requests.rope_positions import GridRun, rope_positions
from forebay.speculation.ngram import Ngram
from tests.integration.rig import Rig
from tests.integration.test_pictures import Prompt, Shown, greedy, run
from tests.kernels import NATIVE
from tests.models.drive import Driver
from tests.models.visual import TEXT, VisualModel, shared_visual

TIGHT = {"num_tokens": 112, "schedule_conservativeness": 0.0}

SECTIONS = RopeSections((2, 2, 2), interleaved=True)
CONTEXT = 256

Part = list[int] | tuple[int, int, int]  # text, or a picture: a number, and the rows and columns of its tokens


@pytest.fixture(scope="module")
def model() -> VisualModel:
    return shared_visual("smolvlm")


@pytest.fixture(scope="module")
def rig(model: VisualModel) -> Rig:
    sizes = {"num_threads": 1, "context_length": CONTEXT, "rope_sections": SECTIONS}
    made = Rig(model.path, dtype=torch.float32, kernels=NATIVE, **sizes)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


def prompt_of(model: VisualModel, parts: list[Part]) -> Prompt:
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        number, *grid = part
        count = grid[0] * grid[1]
        sizes = model.sizes(count // num_tokens(model.tile_sizes[0], model.token_edge))
        pixels = np.random.default_rng(number).bytes(num_pixel_bytes(sizes))
        own = {"digest": digest_of(pixels, tuple(grid), sizes), "grid": tuple(grid), "sizes": sizes}
        pictures.append(Picture(pixels=pixels, runs=((len(ids), count),), **own))
        ids += [model.placeholder] * count
    return Prompt(ids, tuple(pictures))


@pytest.fixture(scope="module")
def shown(model: VisualModel, rig: Rig) -> Shown:
    rng = random.Random(0)
    trunk = [rng.choice(TEXT) for _ in range(20)]

    def own() -> list[int]:
        return [rng.choice(TEXT) for _ in range(rng.randrange(1, 20))]

    same = own()
    listed: list[list[Part]] = [
        [trunk, (1, 4, 4), same],
        [trunk, (1, 2, 8), same],
        [trunk, (1, 4, 4), same, (2, 8, 2), own()],
        [own()],
        [(3, 2, 4), own(), (1, 4, 4), own()],
        [(3, 2, 4), own(), (2, 2, 8)],
        [trunk, own()],
        [trunk, (1, 4, 4), same[:-1], own()],
    ]
    prompts = [prompt_of(model, parts) for parts in listed]
    return Shown.of(rig, prompts, [greedy(10 + i) for i in range(len(prompts))])


def test_log_probabilities_are_those_of_the_model_at_the_prompts_positions(
    model: VisualModel, rig: Rig, shown: Shown
) -> None:
    encoder = rig.encoder
    assert encoder is not None
    for prompt, (tokens, logprobs) in zip(shown.prompts, shown.alone, strict=True):
        ids = [*prompt.ids, *tokens[:-1]]
        table, rows = [torch.zeros(1, encoder.row_size)], torch.zeros(len(ids), dtype=torch.int32)
        runs = [GridRun(its.runs[0][0], *its.grid) for its in prompt.pictures]
        for picture, place in zip(prompt.pictures, runs, strict=True):
            rows[place.start : place.stop] = torch.arange(place.stop - place.start) + sum(map(len, table))
            for tile in np.frombuffer(picture.pixels, np.uint8).reshape(-1, *picture.sizes[0], 3):
                state = encoder.begin(torch.from_numpy(tile.copy()))
                table.append(encoder.finish(encoder.layers(state, 0, encoder.num_layers)))
        driver = Driver(rig._model, context=CONTEXT)
        ctx, input_ids = driver.inputs([(1, ids)])
        places = torch.from_numpy(rope_positions(runs, 0, len(ids)))
        ctx = replace(ctx, rope_positions=places, pictures=PictureRows(torch.cat(table), rows))
        with torch.inference_mode():
            wanted = rig._model.logits(rig._model.forward(ctx, input_ids)).log_softmax(-1)
        for at, (token, found) in enumerate(zip(tokens, logprobs, strict=True), len(prompt.ids) - 1):
            assert found.logprob == pytest.approx(float(wanted[at, token]), abs=1e-4)
            assert found.rank == 1


def test_the_same_picture_in_another_grid_gives_other_log_probabilities(shown: Shown) -> None:
    first, second = shown.prompts[:2]
    assert first.ids == second.ids
    assert shown.alone[0][1][0] != shown.alone[1][1][0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 3), (4, 7), (16, 512)])
@pytest.mark.parametrize("overlap_depth", [0, 2])
def test_tokens_do_not_depend_on_pages_chunks_and_overlap(
    shown: Shown, page_size: int, chunk: int, overlap_depth: int
) -> None:
    engine = shown.rig.engine(page_size=page_size, chunked_prefill_size=chunk, overlap_depth=overlap_depth)
    shown.check(engine, apart=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefix_hits_before_inside_and_behind_pictures(shown: Shown, page_size: int) -> None:
    engine = shown.rig.engine(radix_cache=True, page_size=page_size, chunked_prefill_size=16, overlap_depth=1)
    for apart in (40, 3):
        results = shown.check(engine, apart=apart)
    assert all(
        result.cached_tokens > 0 for result, its in zip(results, shown.prompts, strict=True) if len(its.ids) > 32
    )


def test_a_rows_next_request_has_its_own_positions(shown: Shown) -> None:
    """Text behind pictures, in the only row."""
    engine = shown.rig.engine(max_running_requests=1)
    shown.check(engine)


def test_retracted_requests_keep_their_positions(shown: Shown) -> None:
    for host_bytes in (0, 1 << 20):
        engine = shown.rig.engine(retraction_host_bytes=host_bytes, chunked_prefill_size=16, **TIGHT)
        shown.check(engine)
        assert engine.count("retractions") > 0


def test_drafts_are_verified_at_their_positions(shown: Shown) -> None:
    engine = shown.rig.engine(width=4, proposer=Ngram(SpeculationOptions()), radix_cache=True, overlap_depth=1)
    for _ in range(2):
        shown.check(engine)
    assert run(engine, shown.prompts[:1], shown.params[:1])[0].token_ids == shown.alone[0][0]
