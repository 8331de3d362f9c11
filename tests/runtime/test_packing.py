from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.packing import Packing

SECTIONS = {"a": torch.int64, "b": torch.int32, "c": torch.float64, "d": torch.int32}
CPU = torch.device("cpu")
COUNTS = st.tuples(*[st.integers(0, 9)] * len(SECTIONS))


def write(packing: Packing, counts: tuple[int, ...], base: int) -> tuple[dict, dict]:
    """Sends numbers that tell section and element apart; returns what was written, and the device's views."""
    views = packing.begin(counts)
    for i, (name, count) in enumerate(zip(SECTIONS, counts, strict=True)):
        views.host[name][:] = base + 100 * i + np.arange(count)
    packing.send(views)
    return {name: array.tolist() for name, array in views.host.items()}, views.device


@given(layouts=st.lists(COUNTS, min_size=1, max_size=12), num_words=st.sampled_from([1, 8, 64]))
def test_every_layout_arrives_whole_whatever_came_before_and_however_small_the_buffer_was(layouts, num_words):
    packing = Packing(SECTIONS, CPU, num_words=num_words)
    for step, counts in enumerate(layouts):
        sent, device = write(packing, counts, 1000 * step)
        for (name, dtype), count in zip(SECTIONS.items(), counts, strict=True):
            assert device[name].dtype == dtype
            assert len(device[name]) == count
            assert device[name].tolist() == sent[name]


@given(layouts=st.lists(COUNTS, min_size=2, max_size=8))
def test_a_steps_views_stay_as_they_were_while_the_next_step_is_sent(layouts):
    packing = Packing(SECTIONS, CPU, num_words=2)
    sent, device = write(packing, layouts[0], 0)
    for step, counts in enumerate(layouts[1:], start=1):
        following = write(packing, counts, 1000 * step)
        assert {name: tensor.tolist() for name, tensor in device.items()} == sent
        sent, device = following


def test_the_ring_is_reused_and_a_known_layout_is_not_laid_out_again():
    packing = Packing(SECTIONS, CPU, num_words=64, num_buffers=3)
    seen = [packing.begin((1, 2, 3, 4)) for _ in range(6)]
    assert seen[:3] == seen[3:]
    assert len({views.device["a"].data_ptr() for views in seen}) == 3


def test_every_section_starts_at_a_whole_word():
    views = Packing(SECTIONS, CPU, num_words=64).begin((1, 3, 1, 1))
    base = views.device["a"].data_ptr()
    assert [views.device[name].data_ptr() - base for name in SECTIONS] == [0, 8, 24, 32]
    assert views.num_words == 5


def test_a_layout_needs_a_count_for_each_section():
    with pytest.raises(ValueError):
        Packing(SECTIONS, CPU, num_words=8).begin((1, 2, 3))
