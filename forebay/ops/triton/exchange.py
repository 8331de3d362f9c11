"""The exchange of ranks through memory of a GPU that all of them map, by a kernel that a graph captures.

Each program of the kernel is a lane. It writes its piece of the rank's part into the shared memory and counts itself
there. Once the same lane of every other rank has counted, it copies the pieces of all.

Lanes of one rank do not wait for each other, so each has buffers of its own: exchange n of a lane uses buffer n % 2. A
rank writes buffer n % 2 again in exchange n + 2, behind the counts of n + 1. No lane counts there before it has copied
exchange n.

The counts of all exchanges lie in the shared memory, so that a replay goes on after the last one. They wrap around, and
are compared by their difference.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.base.units import ceil_div
from forebay.ops.exchange import Transport
from forebay.ops.triton.launch import kernel

BUFFERS: Final = 2
LANES: Final = 32  # fewer than a GPU runs at once: a lane that does not run yet would be waited for
LANE_BYTES: Final = 16 << 10  # of a buffer; a longer piece takes several exchanges
_LINE: Final = 32  # int32 from one count to the next: no two are in one line of 128 bytes
_COUNT_BYTES: Final = 4
_WARPS: Final = 8
_WORDS: Final = (torch.int32, torch.int16, torch.uint8)


@kernel
@triton.jit
def _gather_parts(
    part,
    out,
    buffers,
    counts,
    num_words,
    rank,
    SIZE: tl.constexpr,
    BUFFERS: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane, inside = tl.program_id(0), tl.arange(0, BLOCK)
    own = counts + (rank * LANES + lane) * LINE
    count = tl.load(own)
    for first in range(lane * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        at = first + inside
        live = at < num_words
        buffer = buffers + ((count & (BUFFERS - 1)) * SIZE * LANES + lane) * BLOCK + inside
        tl.store(buffer + rank * LANES * BLOCK, tl.load(part + at, mask=live), mask=live)
        tl.debug_barrier()  # all threads have stored before one of them counts for all
        count += 1
        tl.atomic_xchg(own, count, sem="release", scope="sys")
        # One thread looks; the others learn of it through a barrier, and load behind that.
        for of in range(SIZE):
            other = counts + (of * LANES + lane) * LINE
            while tl.atomic_add(other, 0, sem="acquire", scope="sys") - count < 0:
                pass
        into = out + at
        for of in range(SIZE):
            tl.store(into, tl.load(buffer + of * LANES * BLOCK, mask=live), mask=live)
            into += num_words


class MemoryTransport(Transport):
    """Gathers through `memory` [bytes] uint8 of a GPU, which begins as zeros, is the same of all ranks, and is kept.

    A rank that waits for another one waits for ever: the processes of the ranks end together. Scopes are those of the
    system, since the others are other processes, and may run on other GPUs.
    """

    in_graphs = True

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        assert len(memory) >= shared_bytes(size), (len(memory), size)
        self.rank, self.size = rank, size
        begin = size * LANES * _LINE * _COUNT_BYTES
        self._counts, self._buffers = memory[:begin].view(torch.int32), memory[begin : shared_bytes(size)]

    def gathered(self, part: Tensor) -> Tensor:
        out = part.new_empty(self.size, *part.shape)
        if not part.numel():
            return out
        word = _word(part)
        words, into = (each.view(-1).view(torch.uint8).view(word) for each in (part, out))
        block = LANE_BYTES // word.itemsize
        grid = (min(LANES, ceil_div(len(words), block)),)
        arguments = words, into, self._buffers.view(word), self._counts, len(words), self.rank
        _gather_parts[grid](
            *arguments, SIZE=self.size, BUFFERS=BUFFERS, LANES=LANES, LINE=_LINE, BLOCK=block, num_warps=_WARPS
        )
        return out


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that `size` ranks share."""
    return size * LANES * (_LINE * _COUNT_BYTES + BUFFERS * LANE_BYTES)


def _word(part: Tensor) -> torch.dtype:
    """Return the widest type as which a part can be copied. Ranks may copy as different ones: pieces are of bytes."""
    return next(word for word in _WORDS if part.nbytes % word.itemsize == part.data_ptr() % word.itemsize == 0)
