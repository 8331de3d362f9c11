"""Attention on a GPU has the same bits whatever else is in a step: decodes, prompts, chunks, drafts, other tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.helpers import PagedCase, assert_same_bits
from tests.ops.triton_device import HAS_GPU, ON_EACH_DEVICE, OnDevice, TritonOps, attention

LENGTH, OTHER = 136, 20
SEGMENT = 64
segment_of = attention._segment
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages-of-one-token": {"page_size": 1},
    "window": {"sliding_window": 100, "mapped": True},
    "sinks-and-cap": {"with_sinks": True, "softcap": 3.0},
    "latent": {"kv_heads": 1, "head_dim": 40, "v_dim": 32, "latent": True},
    "wide-values": {"head_dim": 48, "v_dim": 136},
    "int8": {"int8": True},
    "int8-latent": {"kv_heads": 1, "head_dim": 40, "v_dim": 32, "latent": True, "int8": True},
    "int8-sinks-in-a-window": {"with_sinks": True, "sliding_window": 33, "int8": True},
    "fp8": {"fp8": True},
    "sinks-in-a-window": {"with_sinks": True, "sliding_window": 33},
}


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def ops(request: pytest.FixtureRequest) -> OnDevice:
    return OnDevice(TritonOps(request.param, 1), request.param)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a few hundred tokens."""
    monkeypatch.setattr(attention, "_segment", lambda *shape: SEGMENT)
    if not HAS_GPU:
        monkeypatch.setattr(attention, "_PROGRAMS", 8)


def sequences(name: str, dtype: torch.dtype) -> PagedCase:
    return PagedCase(
        **{"page_size": 16, "head_dim": 16, **CASES[name]},
        seq_lens=[LENGTH, OTHER, OTHER],
        query_lens=[1, 1, 1],
        dtype=dtype,
        seed=len(name),
    )


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", CASES)
def test_c31_attention_of_a_position_is_the_same_in_every_step(ops: OnDevice, dtype: torch.dtype, name: str) -> None:
    case = sequences(name, dtype)
    prompt = case.run(ops, [0], {0: (0, LENGTH)})
    for end in (SEGMENT - 1, SEGMENT, SEGMENT + 1, LENGTH):
        own = {0: (end - 1, end)}
        decoded = case.run(ops, [1, 0, 2], own | {1: (7, 8), 2: (OTHER - 1, OTHER)})
        assert_same_bits(decoded[1:2], prompt[end - 1 : end])
    beside_a_prompt = case.run(ops, [1, 0], own | {1: (0, OTHER)})
    assert_same_bits(beside_a_prompt[OTHER:], prompt[LENGTH - 1 :])
    for first in (3, SEGMENT):  # blocks of queries on both sides of a segment's end, and none
        assert_same_bits(case.run(ops, [0], {0: (first, LENGTH)}), prompt[first:])


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", ["plain", "window", "sinks-and-cap", "latent"])
def test_c31_bits_of_attention_do_not_depend_on_how_it_is_cut_up(
    ops: OnDevice, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = sequences(name, dtype)
    steps: list[dict[int, tuple[int, int]]] = [
        {0: (LENGTH - 1, LENGTH), 1: (8, 9)},
        {0: (LENGTH - 40, LENGTH), 1: (0, 9)},
    ]
    for step in steps:
        expected = case.run(ops, [0, 1], step)
        for constant, value in (("_PROGRAMS", 1000), ("_PART_BYTES", 0), ("_EXTEND_ROWS", 32), ("_DECODE_ROWS", 32)):
            with monkeypatch.context() as patched:
                patched.setattr(attention, constant, value)
                assert_same_bits(case.run(ops, [0, 1], step), expected)


def test_a_key_that_is_not_a_number_is_in_the_result_of_its_own_segment_c30(ops: OnDevice) -> None:
    case = sequences("plain", torch.float32)
    loc = case.page_table[1, SEGMENT // 16].long() * 16  # of the second segment's first key
    case.k_cache[loc, 0] = torch.nan
    for first in (LENGTH - 1, LENGTH - 5):
        nan = case.run(ops, [0], {0: (first, LENGTH)}).isnan().all(dim=-1)
        assert nan.tolist() == [[True, True, False, False]] * (LENGTH - first)


def test_segments_are_as_long_as_their_sums_are_small() -> None:
    grouped = segment_of(32, 128, 8 * 256 * 2)
    latent = segment_of(128, 512, 576 * 2)
    assert (grouped, latent) == (512, 2048)


@pytest.mark.parametrize(("arch", "rows"), [(80, 32), (89, 32), (90, 64), (100, 32), (120, 32)])
def test_c31_prompts_take_another_matrix_unit_than_decodes_only_where_both_had_the_same_bits(
    arch: int, rows: int
) -> None:
    tilings = [attention._tiling(decodes, 4, 8, (128, 128), torch.bfloat16, arch) for decodes in (True, False)]
    assert [tiling.rows for tiling in tilings] == [16, rows]
    assert len({tiling.keys for tiling in tilings}) == 1
