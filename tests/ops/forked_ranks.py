"""Ranks as processes that are forked from this one: the same function in each."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from tests.deadlines import HANGS_S

Result = TypeVar("Result")


def in_processes(size: int, step: Callable[[int], Result]) -> list[Result]:
    """Run the step of each rank in a process of its own, and return their results. An error of one ends all."""
    pipes, processes = [os.pipe() for _ in range(size)], list[int]()
    try:
        for rank, (_, written) in enumerate(pipes):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # threads of libraries wait for work, and hold nothing
                process = os.fork()
            if process == 0:
                _run(rank, written, step)
            processes.append(process)
            os.close(written)
        data = _all_of([read for read, _ in pipes])
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for read, _ in pipes:
            os.close(read)
    return [pickle.loads(each) for each in data]


def _run(rank: int, written: int, step: Callable[[int], object]) -> NoReturn:
    try:
        torch.set_num_threads(1)  # those of the parent do not exist here
        with os.fdopen(written, "wb") as file:
            file.write(pickle.dumps(step(rank)))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _all_of(pipes: list[int]) -> list[bytes]:
    """Read each pipe to its end."""
    data, left = dict.fromkeys(pipes, b""), set(pipes)
    while left:
        ready, _, _ = select.select(left, (), (), HANGS_S)
        assert ready, "ranks wait for each other"
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            if piece:
                data[pipe] += piece
            else:
                assert data[pipe], "a rank has failed"
                left.remove(pipe)
    return [*data.values()]
