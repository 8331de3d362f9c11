"""The exchange of ranks: what each gets is what the others have, through gloo and through shared memory."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.base.errors import ConfigError
from forebay.ops import Ops
from forebay.ops.exchange import Alone, Exchange, GatheredExchange, LostRank, Share, units_of
from forebay.ops.groups import join_group
from forebay.ops.native.exchange import SharedExchange, mapped, shared_bytes
from forebay.ops.native.kernels import Kernels
from forebay.ops.native.recording import Recording
from tests.kernels import EMULATED, VARIANTS, native_ops
from tests.ops.exchanging import group_exchanges, on_each, shared_exchanges
from tests.ops.forked_ranks import in_processes

pytestmark = pytest.mark.skipif(not VARIANTS or bool(EMULATED), reason="no native kernels for this CPU")

Case = tuple[int, int, torch.dtype, int]  # rows, width and dtype of a part; rows of a table for each rank

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return native_ops(VARIANTS[0], 1).kernels


def part_of(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct for each rank, row and column, as a part of wider rows."""
    entries = torch.arange(rows * (width + 3)).view(rows, width + 3) + 1000 * rank
    return (entries % 251).to(dtype)[:, 1 : 1 + width]


def all_of(exchange: Exchange, case: Case) -> list[torch.Tensor]:
    """The results of every exchange at one rank."""
    rows, width, dtype, per_rank = case
    part, size = part_of(exchange.rank, rows, width, dtype), exchange.size
    whole = exchange.gather(part)
    units = part_of(0, rows, width * len(units_of(exchange.rank, size, size + 1)), dtype)
    uneven = exchange.gather(units, size + 1)
    cut = exchange.collect(part, size * width - min(width - 1, 2))
    ids = (torch.arange(rows) * 7) % (per_rank * size)
    table = part_of(exchange.rank, per_rank, width, dtype)
    found = exchange.rows(table[exchange.places(ids, per_rank)].contiguous(), ids, per_rank)
    told = torch.full((rows,), exchange.rank)
    exchange.spread(told, size - 1)
    exchange.check()
    return [whole, uneven, cut, found, told]


def expected(rank: int, size: int, case: Case) -> list[torch.Tensor]:
    rows, width, dtype, per_rank = case
    whole = torch.cat([part_of(of, rows, width, dtype) for of in range(size)], dim=1)
    counts = [len(units_of(of, size, size + 1)) for of in range(size)]
    uneven = torch.cat([part_of(0, rows, width * count, dtype) for count in counts], dim=1)
    cut = whole[:, : size * width - min(width - 1, 2)]
    table = torch.cat([part_of(of, per_rank, width, dtype) for of in range(size)])
    ids = (torch.arange(rows) * 7) % (per_rank * size)
    return [whole, uneven, cut if rank == 0 else torch.zeros_like(cut), table[ids], torch.full((rows,), size - 1)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [2, 4])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 9), width=st.integers(1, 40), dtype=st.sampled_from(DTYPES), per_rank=st.integers(1, 5),
    part_bytes=st.sampled_from([1024, 4096]),
)  # fmt: skip
def test_exchange_shared_memory_gives_each_rank_the_parts_of_all(
    kernels: Kernels, size: int, rows: int, width: int, dtype: torch.dtype, per_rank: int, part_bytes: int
) -> None:
    exchanges = shared_exchanges([kernels] * size, part_bytes)
    case = rows, width, dtype, per_rank
    for rank, found in enumerate(on_each(exchanges, partial(all_of, case=case))):
        for got, wanted in zip(found, expected(rank, size, case), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_exchange_through_gloo_gives_each_rank_the_parts_of_all(size: int) -> None:
    exchanges = group_exchanges(size)
    for case in ((3, 5, torch.bfloat16, 2), (0, 4, torch.float32, 1), (1, 1, torch.int64, 3)):
        for rank, found in enumerate(on_each(exchanges, partial(all_of, case=case))):
            for got, wanted in zip(found, expected(rank, size, case), strict=True):
                assert torch.equal(got, wanted)


def test_exchange_through_gloo_between_processes_has_the_bits_of_shared_memory(kernels: Kernels) -> None:
    case, file = (7, 9, torch.bfloat16, 3), os.memfd_create("group")

    def run(rank: int) -> list[list[float]]:
        exchange = GatheredExchange(join_group(file, rank, 2, torch.device("cpu")))
        return [each.tolist() for each in all_of(exchange, case)]

    through_gloo = in_processes(2, run)
    os.close(file)
    through_memory = on_each(shared_exchanges([kernels] * 2), partial(all_of, case=case))
    assert through_gloo == [[each.tolist() for each in of_rank] for of_rank in through_memory]


def test_exchange_through_nccl_without_nccl_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="--tp-exchange nccl: this torch was built without NCCL"):
        join_group(0, 0, 2, torch.device("cuda"))


@pytest.mark.parametrize("size", [2, 4])
def test_exchange_one_after_the_other_never_mixes_two(kernels: Kernels, size: int) -> None:
    """With two buffers and a barrier for each exchange, a rank that is ahead overwrites nothing that another reads."""

    def run(exchange: Exchange) -> bool:
        right = True
        for number in range(150):
            part = torch.full((1, 8192), float(1000 * number + exchange.rank))
            whole = exchange.gather(part).view(size, -1)
            wanted = torch.arange(size).view(size, 1) + 1000.0 * number
            right &= bool((whole == wanted).all())
        return right

    assert all(on_each(shared_exchanges([kernels] * size), run))


def test_exchange_recorded_exchanges_anew_in_each_replay(kernels: Kernels) -> None:
    def run(exchange: Exchange) -> list[list[float]]:
        recording, part = Recording(kernels), torch.zeros(1, 2)
        with recording.record():
            whole = exchange.gather(part)
        seen = []
        for value in (1.0, 2.0, 3.0):
            part.fill_(10 * value + exchange.rank)
            recording.replay()
            seen.append(whole[0].tolist())
        return seen

    assert on_each(shared_exchanges([kernels] * 2), run) == [[[v, v, v + 1, v + 1] for v in (10.0, 20.0, 30.0)]] * 2


def test_exchange_of_equal_logits_leaves_the_lowest_id_the_most_likely(kernels: Kernels) -> None:
    def logits_of(exchange: Exchange) -> torch.Tensor:
        return exchange.collect(torch.tensor([[0.5, 2.0, 1.0]]) + torch.tensor([0.0, 0.0, exchange.rank]), 6)

    for exchanges in (shared_exchanges([kernels] * 2), group_exchanges(2)):
        first, _ = on_each(exchanges, logits_of)
        assert first.tolist() == [[0.5, 2.0, 1.0, 0.5, 2.0, 2.0]]
        for ops in (Ops(1), native_ops(VARIANTS[0], 1)):
            assert ops.sampling.argmax_rows(first)[0].tolist() == [1]


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_exchange_rank_whose_process_has_ended_ends_the_wait_with_an_error(kernels: Kernels, how: int | None) -> None:
    waits = "import signal; signal.pause()" if how else "pass"
    with subprocess.Popen([sys.executable, "-c", waits]) as other:
        process = os.pidfd_open(other.pid)
        try:
            if how is not None:
                other.send_signal(how)
            memory = torch.zeros(shared_bytes(kernels, 2), dtype=torch.uint8)
            exchange = SharedExchange(kernels, memory, 0, 2, processes=[process])
            exchange.gather(torch.zeros(1, 1))
            with pytest.raises(LostRank, match="rank 0 of 2: another rank has ended"):
                exchange.check()
        finally:
            os.close(process)


def test_exchange_that_is_ended_ends_the_waits_of_the_others(kernels: Kernels) -> None:
    first, second = shared_exchanges([kernels] * 2)
    second.end()
    first.gather(torch.zeros(1, 1))
    with pytest.raises(LostRank):
        first.check()


def test_exchange_through_a_group_that_is_ended_raises_at_its_next_check() -> None:
    first, second = group_exchanges(2)
    first.end()
    second.check()
    with pytest.raises(LostRank, match="rank 0 of 2 was ended"):
        first.check()


def test_exchange_memory_of_a_file_is_that_of_every_mapping(kernels: Kernels) -> None:
    descriptor = os.memfd_create("exchange")
    size = shared_bytes(kernels, 2, 512)
    os.ftruncate(descriptor, size)
    one, other = mapped(descriptor, size), mapped(descriptor, size)
    os.close(descriptor)
    one[mmap.PAGESIZE // 2] = 7
    assert other[mmap.PAGESIZE // 2] == 7


def test_exchange_row_beyond_its_memory_is_refused_with_both_sizes(kernels: Kernels) -> None:
    first, _ = shared_exchanges([kernels] * 2, 512)
    with pytest.raises(ConfigError, match="a row of 516 bytes is exchanged, and 512 are there"):
        first.gather(torch.zeros(1, 129))


def test_exchange_alone_returns_what_it_is_given() -> None:
    part, ids = torch.ones(2, 3), torch.tensor([4, 5])
    alone = Alone()
    assert alone.gather(part) is part
    assert alone.collect(part, 3) is part
    assert alone.rows(part, ids, 9) is part
    assert alone.places(ids, 9) is ids


def test_share_divides_things_into_consecutive_runs() -> None:
    assert [Share(rank=rank, size=4).of(8, "heads") for rank in range(4)] == [range(r, r + 2) for r in (0, 2, 4, 6)]
    assert Share(rank=1, size=4).padded(10) == 3


def test_share_that_does_not_divide_names_the_nearest_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot divide 6 query heads: 3 or 6 can"):
        Share(size=4).of(6, "query heads")
