"""The pattern of a check covers each byte of each region, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from forebay.config.engine_config import DisaggregationMode
from forebay.pools.cache_spec import RecurrentState
from forebay.requests.transfers import Span
from forebay.transfer.pattern import Pattern
from forebay.transfer.session.layout import columns_of
from tests.transfer.pair import EVERYTHING, LARGE, WINDOW, Half, half, spans_of

NUM_TOKENS = 13


@pytest.fixture
def cache() -> Iterator[Half]:
    made = half(DisaggregationMode.DECODE, EVERYTHING, backend="tcp")
    yield made
    made.transfers.close()


def raw(half: Half, kind: str) -> list[torch.Tensor]:
    """The bytes of each region of a kind, by token or slot: [places, bytes]."""
    size = 1 if kind == "state" else half.cache.page_size
    return [t.view(torch.uint8).reshape(t.shape[0] * size, -1) for t in half.cache.tables[kind].tensors]


def places(half: Half, kind: str, span: Span) -> tuple[int, torch.Tensor]:
    """The first position of a kind whose bytes are sent, and the places from there on."""
    if kind == "state":
        return 0, torch.from_numpy(span.ids.copy())
    first = max(0, NUM_TOKENS - WINDOW + 1) if kind == "window" else span.start
    size, at = half.cache.page_size, np.arange(first - span.start, NUM_TOKENS - span.start)
    return first, torch.from_numpy(span.ids[at // size] * size + at % size)


def test_pattern_byte_that_differs_in_any_region_names_its_column_position_and_values(cache: Half) -> None:
    spans = spans_of(cache, NUM_TOKENS)
    pattern = cache.transfers.pattern(spans, NUM_TOKENS)
    pattern.write()
    assert pattern.wrong() == []
    lines = list(columns_of(cache.cache))
    named: set[str] = set()
    for kind, span in spans.items():
        first, where = places(cache, kind, span)
        for tensor, line in zip(raw(cache, kind), [x for x in lines if x.startswith(f"{kind} ")], strict=True):
            for i in (0, len(where) - 1):
                right = int(tensor[where[i], -1])
                tensor[where[i], -1] = right ^ 0x55
                wrong = f"{line}: at position {first + i} {right:#04x} was sent and {right ^ 0x55:#04x} came"
                assert pattern.wrong() == [wrong]
                tensor[where[i], -1] = right
            named.add(line)
    assert named == set(lines)


def test_pattern_clear_leaves_zeros_in_its_places_and_all_else_as_it_was(cache: Half) -> None:
    before = {kind: [tensor.clone() for tensor in raw(cache, kind)] for kind in spans_of(cache, NUM_TOKENS)}
    spans = spans_of(cache, NUM_TOKENS)
    pattern = cache.transfers.pattern(spans, NUM_TOKENS)
    pattern.write()
    pattern.clear()
    num_bytes = 0
    for kind, span in spans.items():
        _, where = places(cache, kind, span)
        for tensor, old in zip(raw(cache, kind), before[kind], strict=True):
            assert not tensor[where].any()
            num_bytes += tensor[where].numel()
            tensor[where] = old[where]
            assert torch.equal(tensor, old)
    assert pattern.num_bytes == num_bytes


def test_pattern_reports_no_more_regions_than_a_reader_wants() -> None:
    made = half(DisaggregationMode.DECODE, (*LARGE, *LARGE), backend="tcp")
    pattern: Pattern = made.transfers.pattern(spans_of(made, 4), 4)
    pattern.write()
    for tensor in raw(made, "kv"):
        tensor ^= 0xFF
    made.transfers.close()
    assert len(raw(made, "kv")) > len(pattern.wrong()) == 8


def test_pattern_of_a_model_that_keeps_no_kv_leaves_its_pages_out() -> None:
    made = half(DisaggregationMode.DECODE, [spec for spec in EVERYTHING if isinstance(spec, RecurrentState)])
    try:
        spans = spans_of(made, NUM_TOKENS)
        assert spans.keys() == {"kv", "state"}
        pattern = made.transfers.pattern(spans, NUM_TOKENS)
        pattern.write()
        assert pattern.wrong() == []
    finally:
        made.transfers.close()
