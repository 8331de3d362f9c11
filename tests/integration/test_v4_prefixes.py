"""C18, C19, C24, C26: requests of DeepSeek V4 that share a prefix and end apart, at the lengths where blocks of 4 and
128 tokens and windows of 128 end.

Entries and rings of one request must reach no other, whether they come from a hit, from host memory after a retraction
or from a prefill engine.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import cache_sizes
from tests.integration.rig import Rig
from tests.integration.test_hybrid_tokens import Known, greedy
from tests.integration.test_two_engines import Two
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, make_oracle
from tests.pools.caches import cache_types

PAGE = 128  # whole entries of both kinds
SIZES = [(4, 128, 256), pytest.param((384, 512), marks=pytest.mark.slow)]
PUBLISHED = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "sliding_window": 128,
    "head_dim": 32,  # an entry of 128 tokens has 128 bytes, one to be sent with each token
    "index_topk": 16,
    "max_position_embeddings": 640,
}
SHAPE = {"page_size": PAGE, "chunked_prefill_size": 200, "overlap_depth": 1}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    path = tmp_path_factory.mktemp("v4")
    make_oracle("deepseek_v4", **PUBLISHED).save_pretrained(path)
    made = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=640)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(scope="module", params=SIZES, ids=["few", "many"])
def pairs(rig: Rig, request: pytest.FixtureRequest) -> Known:
    """Of each length two prompts whose prefixes are equal up to there; their suffixes differ in length, too."""
    rng = random.Random(6)
    lengths = [size + d for size in request.param for d in (-1, 0, 1)]
    trunk = [rng.randrange(3, VOCAB) for _ in range(lengths[-1])]
    prompts = [[*trunk[:length], *suffix] for length in lengths for suffix in ([5, 6, 7], [8])]
    return Known.of(rig, prompts, [greedy(6)] * len(prompts))


def part(pairs: Known, first: int) -> Known:
    """The two of one length."""
    one = slice(first, first + 2)
    return Known(pairs.rig, pairs.prompts[one], pairs.params[one], pairs.alone[one])


def test_prefix_hit_of_either_and_of_both_at_once_gives_the_bits_of_a_cold_cache(pairs: Known) -> None:
    engine = pairs.rig.engine(radix_cache=True, num_tokens=24 * PAGE, **SHAPE)
    for first in range(0, len(pairs.prompts), 2):
        two = part(pairs, first)
        engine.flush_cache()
        two.check(engine, apart=2)  # the second while the first decodes
        again = two.check(engine)
        assert [result.cached_tokens for result in again] == [
            (len(prompt) - 1) // PAGE * PAGE for prompt in two.prompts
        ]
    engine.flush_cache()
    pairs.check(engine, apart=3)
    pairs.check(engine)


@pytest.mark.parametrize(
    "on_host",
    [pytest.param(0, id="computed again", marks=pytest.mark.slow), pytest.param(1 << 30, id="copied to the host")],
)
def test_retraction_of_either_gives_the_bits_of_a_request_alone(pairs: Known, on_host: int) -> None:
    two_of_the_longest = 2 * -(-(len(max(pairs.prompts, key=len)) + 70) // PAGE)
    tight: dict[str, Any] = {
        "num_tokens": (two_of_the_longest + 1) * PAGE,
        "schedule_conservativeness": 0.0,
        "max_running_requests": 6,
    }
    engine = pairs.rig.engine(radix_cache=False, retraction_host_bytes=on_host, **tight, **SHAPE)
    long = [greedy(70 if len(prompt) % PAGE > 60 or len(prompt) < 10 else 6) for prompt in pairs.prompts]
    known = Known.of(pairs.rig, pairs.prompts, long)
    known.check(engine)
    assert engine.count("retractions") > 0


def test_pair_of_engines_gives_the_bits_of_one(pairs: Known) -> None:
    """Twice: the second time prefill has the prefixes."""
    two = Two(
        pairs.rig,
        {"radix_cache": True, "num_tokens": 24 * PAGE, **SHAPE},
        {"num_tokens": 24 * PAGE, **SHAPE},
    )
    for _ in range(2):
        results = two.run(pairs.prompts, pairs.params)
        assert [(result.token_ids, result.logprobs) for result in results] == pairs.alone


@pytest.mark.parametrize("page_size", [128, 256, 512])
def test_planned_bytes_are_those_of_the_rows_that_locations_reach(rig: Rig, page_size: int) -> None:
    """Pools of the field were sized by the window and addressed by the page: twice the memory."""
    specs, types = rig._model.cache_specs(), cache_types(torch.float32)
    sizes, num = cache_sizes(specs, types), {"kv": 5, "window": 3, "ring": 4}
    cache = CachePool(specs, types, page_size=page_size, num_slots=num, device="cpu")
    planned = {
        "kv": (num["kv"] + 1) * page_size * sizes.kv_bytes_per_token,
        "window": (num["window"] + 1) * (page_size * sizes.num_bytes("window") + sizes.kinds["window"].page_bytes),
        "ring": (num["ring"] + 1) * sizes.num_bytes("ring"),
    }
    assert {kind: cache.num_bytes[kind] for kind in num} == planned
    for spec in specs:
        for column in spec.columns(types):
            if column.per == "kv" and column.tokens:
                [entries] = column.entries(page_size)
                assert entries * column.tokens == page_size  # a location of the page for each, and for no more
