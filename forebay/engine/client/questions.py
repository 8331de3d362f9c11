"""Questions to an engine, and their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from forebay.base.errors import Unavailable
from forebay.engine.frames import (
    CheckTransfers,
    FlushCache,
    GetReuse,
    GetState,
    GetTree,
    LoadAdapter,
    Release,
    Resume,
    ReuseReport,
    SaveCache,
    State,
    ToEngine,
    TreePart,
    UnloadAdapter,
    UpdateWeights,
)

Question = (
    GetState
    | GetTree
    | GetReuse
    | FlushCache
    | SaveCache
    | Release
    | Resume
    | UpdateWeights
    | LoadAdapter
    | UnloadAdapter
    | CheckTransfers
)


class Questions:
    """Questions without an answer yet, by serial."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._serials = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def ask(self, question: type[Question], **what: Any) -> Any:
        """Send a question, and return the frame that answers it."""
        serial = next(self._serials)
        answer = self._answers[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(serial=serial, **what))
            return await answer
        finally:
            del self._answers[serial]

    def answer(self, frame: State | TreePart | ReuseReport) -> None:
        """Take an answer. A frame without a question, or whose question was cancelled, is dropped."""
        answer = self._answers.get(frame.answers)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def fail(self, make_error: Callable[[], Unavailable]) -> None:
        """Answer every question with an error of its own."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(make_error())
