from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.host.packing import Packing, Sections

SECTIONS = {"a": torch.int64, "b": torch.int32, "c": torch.float64, "d": torch.int32}
CPU = torch.device("cpu")
COUNTS = st.tuples(*[st.integers(0, 9)] * len(SECTIONS))


def send(packing: Packing, counts: tuple[int, ...], base: int) -> tuple[dict, Sections]:
    """Sends numbers that tell section and element apart; returns what was sent, and the device's views."""
    arrays = {
        name: base + 100 * i + np.arange(count) for i, (name, count) in enumerate(zip(SECTIONS, counts, strict=True))
    }
    return {name: array.tolist() for name, array in arrays.items()}, packing.send(arrays)


@given(layouts=st.lists(COUNTS, min_size=1, max_size=12), num_words=st.sampled_from([1, 8, 64]))
def test_every_layout_arrives_whole_whatever_came_before_and_however_small_the_buffer_was(layouts, num_words):
    packing = Packing(SECTIONS, CPU, num_words=num_words)
    for step, counts in enumerate(layouts):
        sent, device = send(packing, counts, 1000 * step)
        for (name, dtype), count in zip(SECTIONS.items(), counts, strict=True):
            assert device[name].dtype == dtype
            assert (name in device) == (count > 0)
            assert device[name].tolist() == sent[name]
        assert device.of(["b", "c"]).keys() == {"b", "c"} & device.keys()


@given(layouts=st.lists(COUNTS, min_size=2, max_size=8))
def test_a_steps_views_stay_as_they_were_while_the_next_step_is_sent(layouts):
    packing = Packing(SECTIONS, CPU, num_words=2)
    sent, device = send(packing, layouts[0], 0)
    for step, counts in enumerate(layouts[1:], start=1):
        following = send(packing, counts, 1000 * step)
        assert {name: device[name].tolist() for name in SECTIONS} == sent
        sent, device = following


def test_the_ring_is_reused_and_a_known_layout_is_not_laid_out_again():
    packing = Packing(SECTIONS, CPU, num_words=64, num_buffers=3)
    seen = [send(packing, (1, 2, 3, 4), step)[1] for step in range(6)]
    assert all(again is views for again, views in zip(seen[3:], seen, strict=False))
    assert len({views["a"].data_ptr() for views in seen}) == 3


def test_every_section_starts_at_a_whole_word():
    device = send(Packing(SECTIONS, CPU, num_words=64), (1, 3, 1, 1), 0)[1]
    base = device["a"].data_ptr()
    assert [device[name].data_ptr() - base for name in SECTIONS] == [0, 8, 24, 32]


def test_what_was_not_declared_is_not_sent():
    packing = Packing(SECTIONS, CPU, num_words=8)
    with pytest.raises(KeyError, match="e"):
        packing.send({"e": np.arange(2)})
    with pytest.raises(KeyError, match="e"):
        packing.send({})["e"]
