"""A buffer in shared memory: whole records only, the newest ones, also while a writer goes on or has been killed."""

from __future__ import annotations

import os
from random import Random

import pytest

from forebay.base.record_buffer import FIRST_BYTES, RecordBuffer, shared_memory


def buffer_of(num_bytes: int) -> tuple[RecordBuffer, RecordBuffer]:
    """A writer's buffer and a reader's."""
    with shared_memory("test") as memory:
        reader = RecordBuffer.of(memory.fileno(), num_bytes)
        writer = RecordBuffer.existing(memory.fileno())
    assert writer is not None
    return writer, reader


@pytest.mark.parametrize("seed", range(4))
def test_record_buffer_records_of_any_length_keeps_the_newest_whole_ones(seed: int) -> None:
    rng, (writer, reader), written = Random(seed), buffer_of(1000), []
    writer.keep(b"first")
    for _ in range(300):
        written.append(rng.randbytes(rng.choice([0, 1, 7, 60, 300])))
        writer.append(written[-1])
        found = reader.content()
        assert found.first == b"first"
        assert found.records == written[len(written) - len(found.records) :]
        held = sum(len(record) + 4 for record in found.records)
        assert found.num_lost_bytes == sum(len(record) + 4 for record in written) - held
        assert held <= 1000
        assert held > 1000 - 304 or len(found.records) == len(written)


def test_record_buffer_writer_in_another_process_is_killed_and_its_records_are_there() -> None:
    writer, reader = buffer_of(1 << 16)
    child = os.fork()
    if not child:
        for i in range(100):
            writer.append(b"%d" % i)
        os._exit(9)
    os.waitpid(child, 0)
    assert reader.content().records == [b"%d" % i for i in range(100)]


def test_record_buffer_record_with_one_before_it_writes_both_or_none() -> None:
    writer, reader = buffer_of(100)
    for number in range(9):
        writer.append(b"second %d" % number, b"first %d" % number)
    assert reader.content().records[-2:] == [b"first 8", b"second 8"]
    with pytest.raises(ValueError, match="in a buffer of 100"):
        writer.append(bytes(60), bytes(60))
    assert reader.content().records[-2:] == [b"first 8", b"second 8"]


def test_record_buffer_record_too_long_is_refused_and_changes_nothing() -> None:
    writer, reader = buffer_of(100)
    writer.append(b"kept")
    with pytest.raises(ValueError, match="a record of 97 bytes in a buffer of 100"):
        writer.append(bytes(97))
    with pytest.raises(ValueError, match="a first record of"):
        writer.keep(bytes(FIRST_BYTES))
    assert reader.content().records == [b"kept"]


def test_record_buffer_memory_without_a_size_is_no_ring() -> None:
    with shared_memory("test") as memory:
        assert RecordBuffer.existing(memory.fileno()) is None
