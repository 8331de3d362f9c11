"""The records of the log of ranks: what was sent arrives, in its order, or the reader ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.ranks.log import Capture, Keep, LogBroken, LogReader, LogWriter, Release, Resume, Update, Void
from tests.requests.test_step_plan import INTS, PLANS, SLOTS


def read_all(written: list[bytes]) -> None:
    reader = LogReader(rank=1)
    for record in written:
        reader.entry(record)


TAGS = st.lists(st.text(max_size=5), max_size=3).map(tuple)
ENTRIES: st.SearchStrategy[Any] = st.one_of(
    PLANS,
    st.builds(Capture),
    st.builds(Void, step=INTS),
    st.builds(Keep, slots=SLOTS),
    st.builds(Release, tags=TAGS),
    st.builds(Resume, tags=TAGS),
    st.builds(Update, path=st.text()),
)


def records(num: int) -> list[bytes]:
    writer = LogWriter()
    return [writer.record(Void(step=step)) for step in range(num)]


@settings(max_examples=25)
@given(entries=st.lists(ENTRIES, max_size=3))
def test_log_any_entries_arrive_as_they_were_written(entries):
    writer, reader = LogWriter(), LogReader(rank=1)
    arrived = [reader.entry(writer.record(entry)) for entry in entries]
    assert arrived == entries
    assert [type(entry) for entry in arrived] == [type(entry) for entry in entries]
    assert (reader.read.num_entries, reader.read.digest) == (len(entries), writer.written.digest)


def test_log_record_left_out_names_both_numbers():
    reader, (first, _, third) = LogReader(rank=2), records(3)
    reader.entry(first)
    with pytest.raises(LogBroken, match="rank 2: log entry 2 arrived, entry 1 expected"):
        reader.entry(third)


def test_log_record_after_other_entries_names_both_digests():
    reader, others = LogReader(rank=1), LogWriter()
    reader.entry(records(1)[0])
    others.record(Void(step=7))
    mine, theirs = reader.read.digest.hex(), others.written.digest.hex()
    with pytest.raises(LogBroken, match=f"log entry 1 follows entries with the digest {theirs}, .* have {mine}"):
        reader.entry(others.record(Void(step=1)))


@settings(max_examples=60)
@given(data=st.data())
def test_log_changed_bytes_are_refused_at_once_or_with_the_next_record(data):
    first, second = records(2)
    at = data.draw(st.integers(0, len(first) - 1))
    flipped = bytearray(first)
    flipped[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LogBroken):
        read_all([bytes(flipped), second])


@pytest.mark.parametrize("record", [b"", bytes(24), np.arange(40, dtype=np.uint8).tobytes()])
def test_log_bytes_that_are_no_record_are_refused(record):
    with pytest.raises(LogBroken):
        LogReader(rank=1).entry(record)
