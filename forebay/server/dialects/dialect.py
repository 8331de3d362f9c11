"""The interface of dialects to an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice, Piece
from forebay.engine.scores import Scored
from forebay.server.answering.generation import Generation
from forebay.text.answers.parts import Part


class Dialect(ABC):
    """One shape of answers, whole and in a stream of events. Made for one request; nothing is validated per token."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"  # of a stream

    @abstractmethod
    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        """The body of an answer that is not streamed; `texts`, `parts` and `scores` by choice."""

    @abstractmethod
    def opening(self, generation: Generation) -> bytes:
        """Return the events before all pieces. The first piece is there, so the effect of the prefix cache is known."""

    @abstractmethod
    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is text and nothing else."""

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of a piece, or none."""

    @abstractmethod
    def closing(self, generation: Generation) -> bytes:
        """The end of a stream."""

    @abstractmethod
    def failure(self, error: ForebayError) -> bytes:
        """The end of a stream that failed, whose status has been sent."""
