"""Two ranks on one GPU: exchanges in graphs and outside of them, and the bits of one rank. NCCL refuses such ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.ranks.test_equal_bits import answers, engine
from tests.models.tiny import shared_tiny

SIZE = 2
_EXCHANGES = """
import json, sys, torch
from forebay.ops.triton.exchange import MemoryTransport, shared_bytes
from forebay.pools.cuda_shared import map_shared
file, rank, size = map(int, sys.argv[1:])
transport = MemoryTransport(map_shared(file, shared_bytes(size), torch.device("cuda", 0)), rank, size)
part = torch.zeros(300_000, device="cuda")
seen = []
for _ in range(3):
    part.fill_(10 * (len(seen) + 1) + rank)
    seen.append(transport.gathered(part)[:, [0, -1]].tolist())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    first = transport.gathered(part)
    second = transport.gathered(first[rank] + 1)
for _ in range(5):
    part.fill_(10 * (len(seen) + 1) + rank)
    graph.replay()
    seen.append((second - 1)[:, [0, -1]].tolist())
print(json.dumps(seen))
"""


@pytest.mark.gpu
def test_exchange_between_processes_on_one_gpu_is_replayed_in_its_order() -> None:
    import torch

    from forebay.ops.triton.exchange import shared_bytes
    from forebay.pools.cuda_shared import take_shared

    _, file = take_shared(shared_bytes(SIZE), torch.device("cuda", 0))
    torch.cuda.synchronize()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _EXCHANGES, *map(str, (file, rank, SIZE))], stdout=subprocess.PIPE, pass_fds=[file]
        )
        for rank in range(SIZE)
    ]
    found = [json.loads(rank.communicate()[0]) for rank in ranks]
    os.close(file)
    assert found == [[[[10 * n + rank] * 2 for rank in range(SIZE)] for n in range(1, 9)]] * SIZE


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama", "falcon_h1"])
def test_ranks_on_one_gpu_have_the_bits_of_one_in_graphs_and_eager(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute dense products by Forebay's own kernel: ranks do so always."""
    from forebay.ops.triton.choices import ALL_ROWS, Choice, Choices

    monkeypatch.setattr(Choices, "of", lambda self, weight: Choice(ALL_ROWS, "of a test"))
    flags = {"device": "cuda", "kernels": "triton", "page_size": 4, "chunked_prefill_size": 7}
    path = shared_tiny(case).path
    with engine(case, path, 1, flags) as one, engine(case, path, SIZE, flags | {"tp_exchange": "ipc"}) as ranks:
        for core in (one, ranks):
            assert core.scheduler.state(0.0).counters["replayed_steps"] == 0
        assert answers(ranks) == answers(one)
        for core in (one, ranks):
            while core.in_idle_time():
                pass
        assert answers(ranks) == answers(one)
        assert ranks.scheduler.state(0.0).counters["replayed_steps"] > 0
        assert ranks.stats.counters["engine.steps_on_ranks"] > 0
