"""Chat templates rendered in the test's own process: fast, and where a fuzzer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.text import chat_template
from forebay.text.template_frames import Answer, decode_question
from forebay.text.template_worker import Worker


class InThisProcess:
    """What a template's own process does."""

    has_ended = False

    def __init__(self) -> None:
        self._worker = Worker()

    def ask(self, question: bytes, timeout_s: float) -> Answer:
        return self._worker.answer(decode_question(question))

    def end(self) -> None:
        pass


@contextmanager
def templates_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "TemplateProcess", InThisProcess)
        yield
