"""The exchange through a GPU's memory: between processes in Triton's interpreter, and what one rank leaves there."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forebay.ops.exchange import GatheredExchange
from tests.ops.forked_ranks import in_processes
from tests.ops.triton_device import INTERPRETER_ALONE

from triton.runtime import interpreter  # isort: skip
from forebay.ops.triton import exchange as of_gpu  # isort: skip  # behind the check that Triton is installed
from forebay.ops.triton.exchange import MemoryTransport, shared_bytes  # isort: skip
from tests.ops.test_exchange import Case, all_of, expected  # isort: skip

pytestmark = INTERPRETER_ALONE
_LARGEST = 2**31 - 1


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes of 64 bytes: small tensors take several exchanges of each."""
    monkeypatch.setattr(of_gpu, "LANES", 3)
    monkeypatch.setattr(of_gpu, "LANE_BYTES", 64)


def memory_of(size: int) -> torch.Tensor:
    """Memory that forked processes share."""
    return torch.frombuffer(mmap.mmap(-1, shared_bytes(size)), dtype=torch.uint8)


def on_ranks(size: int, step: Callable[[MemoryTransport], object], memory: torch.Tensor) -> list[object]:
    return in_processes(size, lambda rank: step(MemoryTransport(memory, rank, size)))


@pytest.mark.parametrize("size", [2, 3])
def test_exchange_through_memory_of_a_gpu_gives_each_rank_the_parts_of_all(size: int) -> None:
    cases: list[Case] = [(3, 5, torch.bfloat16, 2), (0, 4, torch.float32, 1), (7, 9, torch.int64, 3)]

    def run(transport: MemoryTransport) -> list[bool]:
        exchange = GatheredExchange(transport)
        pairs = [
            pair
            for case in cases
            for pair in zip(all_of(exchange, case), expected(exchange.rank, size, case), strict=True)
        ]
        return [torch.equal(found, wanted) for found, wanted in pairs]

    assert on_ranks(size, run, memory_of(size)) == [[True] * 5 * len(cases)] * size


def test_exchange_through_memory_one_after_the_other_never_mixes_two() -> None:
    """Of every type and of lengths that take one exchange of some lanes and several of others; counts wrap around."""
    size, memory = 2, memory_of(2)
    MemoryTransport(memory, 0, size)._counts.fill_(_LARGEST - 5)

    def run(transport: MemoryTransport) -> list[int]:
        mixed = []
        for number in range(20):
            dtype = (torch.float32, torch.int64, torch.bfloat16, torch.uint8)[number % 4]
            parts = [(torch.arange(1 + 7 * number % 85) + 50 * rank + number).to(dtype) for rank in range(size)]
            if not torch.equal(transport.gathered(parts[transport.rank]), torch.stack(parts)):
                mixed.append(number)
        return mixed

    assert on_ranks(size, run, memory) == [[], []]


def test_exchange_in_memory_stays_until_every_rank_has_come_to_the_next_one() -> None:
    """Rank 1 counts as far ahead, so that rank 0 waits for nothing: of its last two exchanges both are in memory."""
    memory = memory_of(2)
    transport = MemoryTransport(memory, 0, 2)
    transport._counts.view(2, -1)[1] = 100
    for number in range(5):
        transport.gathered(torch.full((4,), number, dtype=torch.int32))
        kept = transport._buffers.view(torch.int32).view(of_gpu.BUFFERS, 2, 3, -1)[:, 0, 0, :4]
        assert {int(value) for value in kept.unique()} == {max(number - 1, 0), number}
    assert int(transport._counts[0]) == 5


def test_exchange_through_memory_reads_parts_only_after_all_have_counted() -> None:
    """Rank 1 counts last, and writes before: rank 0 has what it has written then."""
    memory = memory_of(2)

    def run(rank: int) -> list[int]:
        transport = MemoryTransport(memory, rank, 2)
        if rank:
            while not int(transport._counts[0]):  # rank 0 has come
                pass
        part = torch.full((4,), 7 + rank, dtype=torch.int32)
        return [int(value) for value in transport.gathered(part)[:, 0]]

    assert in_processes(2, run) == [[7, 8]] * 2


def test_exchange_through_memory_counts_behind_its_stores_and_loads_behind_the_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `test_triton_ptx.py` reads it in the compiled code: the scope is the system, since ranks are processes."""
    builder, seen = interpreter.interpreter_builder, list[str]()

    def recorded(name: str, *shown: int) -> None:
        call = getattr(builder, name)

        def record(*args: Any, **options: Any) -> Any:
            seen.append(" ".join([name, *(args[at].name for at in shown)]))
            return call(*args, **options)

        monkeypatch.setattr(builder, name, record)

    for name in ("create_masked_load", "create_masked_store", "create_barrier"):
        recorded(name)
    recorded("create_atomic_rmw", 0, 4, 5)
    transport = MemoryTransport(memory_of(2), 0, 2)
    transport._counts.view(2, -1)[1] = 100
    transport.gathered(torch.zeros(4, dtype=torch.int32))
    count, look = "create_atomic_rmw XCHG RELEASE SYSTEM", "create_atomic_rmw ADD ACQUIRE SYSTEM"
    copy = ["create_masked_load", "create_masked_store"]
    assert seen == ["create_masked_load", *copy, "create_barrier", count, look, look, *copy, *copy]


def test_exchange_copies_by_the_widest_words_of_a_part_and_its_address() -> None:
    whole = torch.arange(64, dtype=torch.uint8)
    assert [of_gpu._word(whole[at : at + 8]) for at in (0, 2, 1)] == [torch.int32, torch.int16, torch.uint8]
    assert [of_gpu._word(whole[:count]) for count in (12, 6, 5)] == [torch.int32, torch.int16, torch.uint8]
