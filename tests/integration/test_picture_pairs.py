"""C21, C22, C28, C34: images with a prefill and a decode engine, for models with plain rope and with M-RoPE."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from forebay.requests.updates import FinishReason
from tests.integration.rig import Result, Rig
from tests.integration.test_hybrid_tokens import scores
from tests.integration.test_pictures import Album, Prompt, Shown, greedy
from tests.integration.test_two_engines import Two
from tests.kernels import NATIVE
from tests.models.visual import TEXT, shared_visual

TYPES = ("smolvlm", "qwen2_vl", "qwen3_vl")
CACHED = {"page_size": 4, "radix_cache": True, "chunked_prefill_size": 24}


@pytest.fixture(scope="module", params=TYPES)
def shown(request: pytest.FixtureRequest) -> Shown:
    """Prompts with the same text and other pictures, a shared beginning, two pictures, and text alone."""
    model = shared_visual(request.param)
    rig = Rig(model.path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    album, rng = Album(model), random.Random(3)
    trunk, same, own = ([rng.choice(TEXT) for _ in range(count)] for count in (18, 7, 11))
    prompts = [
        album.prompt(trunk, (1, 1), same),
        album.prompt(trunk, (2, 1), same),
        album.prompt(own),
        album.prompt((3, 2), own, (1, 1), same),
    ]
    return Shown.of(rig, prompts, [greedy(17 + i) for i in range(len(prompts))])


def run(two: Two, shown: Shown, prompts: list[Prompt] | None = None, **options: Any) -> list[Result]:
    prompts = prompts or shown.prompts
    pictures = [prompt.pictures for prompt in prompts]
    return two.run([prompt.ids for prompt in prompts], shown.params, pictures=pictures, **options)


def encoded(two: Two) -> tuple[float, float]:
    return two.prefill.count("encoded_tiles"), two.decode.count("encoded_tiles")


@pytest.mark.quick(1)
def test_c21_c28_tokens_behind_images_are_those_of_one_engine_and_prefill_alone_encodes(shown: Shown) -> None:
    """Twice: the second time with prefixes that have pictures in both caches, under ids that differ."""
    two = Two(shown.rig, {**CACHED, "page_size": 16}, {**CACHED, "overlap_depth": 1})
    two.decode.run([shown.prompts[1].ids], greedy(1), pictures=[shown.prompts[1].pictures])
    two.decode.core.scheduler.pools.cache.flush()
    before = encoded(two)[1]
    for _ in range(2):
        results = run(two, shown)
        assert scores(results) == shown.alone
    assert all(result.cached_tokens for result, its in zip(results, shown.prompts, strict=True) if its.pictures)
    assert encoded(two)[0] > 0
    assert encoded(two)[1] == before


def test_c26_retracted_request_with_images_continues_on_decode(shown: Shown) -> None:
    longest = max(len(its.ids) + own.max_tokens for its, own in zip(shown.prompts, shown.params, strict=True))
    tight = {"page_size": 4, "num_tokens": round(1.7 * longest / 4) * 4, "schedule_conservativeness": 0.0}
    two = Two(shown.rig, {"page_size": 4}, tight)
    assert scores(run(two, shown)) == shown.alone
    assert two.decode.count("retractions") > 0
    assert encoded(two)[1] > 0


def test_c22_failed_transfer_with_images_is_a_typed_error_and_its_retry_has_the_same_tokens(shown: Shown) -> None:
    two = Two(shown.rig, CACHED, CACHED)
    two.prefill.core.exchange.transfers.num_lost = 2
    results = run(two, shown, failing={"transfer_lost"})
    ends = [result.finish for result in results]
    assert ends.count(FinishReason.ERROR) == 2
    for result, alone in zip(results, shown.alone, strict=True):
        assert result.finish is FinishReason.ERROR or scores([result]) == [alone]
    assert scores(run(two, shown)) == shown.alone


def test_c27_aborted_request_with_images_leaves_the_others_their_tokens(shown: Shown) -> None:
    two = Two(shown.rig, CACHED, CACHED)
    left: list[Result] = []

    def abort(result: Result) -> bool:
        """The first leaves before its prompt is computed, another one behind its second token."""
        leaves = len(result.token_ids) == 2 if left else True
        if leaves and len(left) < 2:
            left.append(result)
        return any(result is its for its in left)

    results = run(two, shown, abort=abort, failing={"aborted"})
    assert {result.finish for result in left} == {FinishReason.ABORT}
    for result, alone in zip(results, shown.alone, strict=True):
        assert any(result is its for its in left) or scores([result]) == [alone]
    assert scores(run(two, shown)) == shown.alone


def test_c34_image_that_the_two_servers_read_differently_is_a_typed_error(shown: Shown) -> None:
    two = Two(shown.rig, CACHED, CACHED)
    swapped = [shown.prompts[1], shown.prompts[0], *shown.prompts[2:]]
    assert shown.prompts[0].ids == shown.prompts[1].ids
    halves = [[its.pictures for its in prompts] for prompts in (shown.prompts, swapped)]
    ids = [its.ids for its in shown.prompts]
    results = two.run(ids, shown.params, pictures=halves[0], of_decode=halves[1], failing={"images_differ"})
    assert [result.finish for result in results[:2]] == [FinishReason.ERROR] * 2
    assert scores(results[2:]) == shown.alone[2:]
