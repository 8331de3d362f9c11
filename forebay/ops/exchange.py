"""The exchange of tensors between the ranks of a model that is split, as ops of a step.

All ranks call the same exchanges in the same order, with the same shapes. None of them adds anything up: what a rank
gets are the bits that another one computed.

Shape letters: T tokens, N outputs of all ranks together, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from forebay.base.errors import ConfigError, EngineError

READER: Final = 0  # the rank that samples


def units_of(rank: int, size: int, units: int) -> range:
    """Return which of `units` equal things a rank has, if there are as many as ranks at least: runs whose lengths
    differ by 1 at most."""
    return range(rank * units // size, (rank + 1) * units // size)


class Exchange(Protocol):
    """The exchanges of one rank with the others. Not safe to call from two threads at once. `in_graphs`: whether a
    captured step has its exchanges within, so that a replay exchanges anew."""

    rank: int
    size: int
    in_graphs: bool

    def gather(self, part: Tensor, units: int | None = None) -> Tensor:
        """part [T, n] of each rank -> [T, N], side by side in the order of the ranks. The part's rows may be parts of
        wider rows. Ranks have parts of the same size, or of `units` equal runs of columns those that `units_of`
        says."""
        ...

    def collect(self, part: Tensor, width: int) -> Tensor:
        """part [T, n], of the same size on all ranks -> the first `width` columns of them side by side at rank 0; the
        others get zeros of the same shape."""
        ...

    def places(self, ids: Tensor, per_rank: int) -> Tensor:
        """ids [T] int64 -> where, among its `per_rank` rows of a table, a rank has each: [T] int64. Rank r has the rows
        from r * per_rank on."""
        ...

    def rows(self, part: Tensor, ids: Tensor, per_rank: int) -> Tensor:
        """Rows at `places` of each rank's part of a table, [T, H], and their ids -> the rows of the ids, [T, H]."""
        ...

    def spread(self, values: Tensor, source: int = READER) -> None:
        """Overwrite contiguous values with those of the rank `source`."""
        ...

    def check(self) -> None:
        """Raise EngineError if a rank has ended: exchanges since then have not written their results."""
        ...

    def end(self) -> None:
        """End the waits of all ranks, now and later: their checks raise."""
        ...


class Alone(Exchange):
    """The exchange of a model that is not split: nothing is copied."""

    rank, size, in_graphs = 0, 1, True

    def gather(self, part: Tensor, units: int | None = None) -> Tensor:
        return part

    def collect(self, part: Tensor, width: int) -> Tensor:
        return part

    def places(self, ids: Tensor, per_rank: int) -> Tensor:
        return ids

    def rows(self, part: Tensor, ids: Tensor, per_rank: int) -> Tensor:
        return part

    def spread(self, values: Tensor, source: int = READER) -> None:
        return

    def check(self) -> None:
        return

    def end(self) -> None:
        return


ALONE: Final = Alone()


class Transport(Protocol):
    """Brings the parts of all ranks to each of them. All ranks call it in the same order, with parts of one shape."""

    rank: int
    size: int
    in_graphs: bool

    def gathered(self, part: Tensor) -> Tensor:
        """part [...], contiguous, of each rank -> [size, ...], in the order of the ranks."""
        ...


class GatheredExchange(Exchange):
    """See `Exchange`, on any device: each exchange gathers the parts of all ranks, and takes from them.

    It does not detect that another rank has ended: the processes of the ranks end together.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size, self.in_graphs = transport.rank, transport.size, transport.in_graphs
        self._has_ended = False

    def gather(self, part: Tensor, units: int | None = None) -> Tensor:
        counts = [len(units_of(rank, self.size, units or self.size)) for rank in range(self.size)]
        unit = part.shape[1] // counts[self.rank]
        missing = unit * max(counts) - part.shape[1]
        padded = torch.nn.functional.pad(part, (0, missing)) if missing else part
        parts = zip(self._gathered(padded), counts, strict=True)
        return torch.cat([of_rank[:, : unit * count] for of_rank, count in parts], dim=1)

    def collect(self, part: Tensor, width: int) -> Tensor:
        whole = self.gather(part)[:, :width].contiguous()
        return whole if self.rank == READER else torch.zeros_like(whole)

    def places(self, ids: Tensor, per_rank: int) -> Tensor:
        return ids % per_rank

    def rows(self, part: Tensor, ids: Tensor, per_rank: int) -> Tensor:
        return self._gathered(part)[ids // per_rank, torch.arange(len(ids), device=ids.device)]

    def spread(self, values: Tensor, source: int = READER) -> None:
        values.copy_(self._gathered(values)[source])

    def check(self) -> None:
        """Raise EngineError if this rank was ended."""
        if self._has_ended:
            raise LostRank(f"rank {self.rank} of {self.size} was ended: its exchanges are not those of the others")

    def end(self) -> None:
        """End this rank alone: its checks raise."""
        self._has_ended = True

    def _gathered(self, part: Tensor) -> Tensor:
        return self._transport.gathered(part.contiguous())


class LostRank(EngineError):
    """Another rank has ended, or all were ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of a model that a rank has: the `rank`-th of `size` equal ones. In builds without weights, which compute
    nothing, `exchange` may be `Alone`."""

    rank: int = 0
    size: int = 1
    exchange: Exchange = ALONE

    def of(self, count: int, what: str) -> range:
        """Return which of `count` equal things are this rank's. Raises ConfigError if they cannot be divided."""
        if count % self.size:
            works = [size for size in range(1, count + 1) if count % size == 0]
            fewer, more = max(n for n in works if n < self.size), [n for n in works if n > self.size][:1]
            nearest = " or ".join(map(str, [fewer, *more]))
            raise ConfigError(f"{self.size} ranks cannot divide {count} {what}: {nearest} can")
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def with_copies(self, count: int, what: str) -> range:
        """Return as `of`; if there are fewer things than ranks, several ranks have the same one."""
        if count >= self.size or self.size % count:
            return self.of(count, what)
        return range(self.rank * count // self.size, self.rank * count // self.size + 1)

    def part(self, *own: range) -> tuple[range, ...]:
        """Return the runs of rows that are this rank's; () if it has all."""
        return own if self.size > 1 else ()

    def padded(self, count: int) -> int:
        """Return how many of `count` rows of a table each rank has; the last ones may have fewer."""
        return -(-count // self.size)

    def own_padded(self, count: int) -> tuple[range, ...]:
        """Return this rank's rows of a table of `count`, `padded` of them: the last row fills up what is missing. ()
        for all."""
        if self.size == 1:
            return ()
        each = self.padded(count)
        rows = range(min(self.rank * each, count), min((self.rank + 1) * each, count))
        return (rows, *[range(count - 1, count)] * (each - len(rows)))


WHOLE: Final = Share()


def share_of(exchange: Exchange) -> Share:
    """Return the share of the rank that exchanges so."""
    return Share(rank=exchange.rank, size=exchange.size, exchange=exchange)
