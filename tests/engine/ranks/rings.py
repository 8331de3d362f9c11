"""A ring whose ends are in one process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from forebay.base.errors import EngineError
from forebay.engine.ranks.ring import RingReader, RingWriter


class Ring:
    """A writer, a reader for each of `num_ranks`, and the descriptors of the latter. `now` is the clock."""

    def __init__(self, stack: ExitStack, num_ranks: int, num_bytes: int) -> None:
        self.now, self._stack = 0.0, stack
        memory = stack.enter_context(mmap.mmap(-1, num_bytes))
        pipes = [(os.pipe(), os.pipe()) for _ in range(num_ranks)]
        self.theirs = [(places[0], outcomes[1]) for places, outcomes in pipes]
        self.readers = [RingReader(memory, *ends) for ends in self.theirs]
        self.writer = RingWriter(
            memory,
            [places[1] for places, _ in pipes],
            [outcomes[0] for _, outcomes in pipes],
            on_lost=_raise,
            clock=lambda: self.now,
        )
        for places, outcomes in pipes:
            for fd in (*places, *outcomes):
                stack.callback(close_quietly, fd)

    def end(self, rank: int) -> None:
        """Close what a rank's process would have closed by its end."""
        for fd in self.theirs[rank - 1]:
            os.close(fd)


@contextmanager
def ring(num_ranks: int = 1, num_bytes: int = 1 << 16) -> Iterator[Ring]:
    with ExitStack() as stack:
        yield Ring(stack, num_ranks, num_bytes)


def close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return


def _raise(error: EngineError) -> NoReturn:
    raise error
