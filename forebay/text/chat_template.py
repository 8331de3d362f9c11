"""Chat templates, rendered in processes of their own that can be ended: they are programs, and not ours."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forebay.base.errors import InvalidRequest, ModelError
from forebay.text.template_frames import Compile, Failed, Render, Rendered, encode
from forebay.text.template_process import TemplateProcess

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_WAIT_S: Final = 20.0  # by the clock, for what may take `MAX_CPU_S` of the processor
MAX_START_S: Final = 60.0  # the same for a process that is yet to import jinja2


class ChatTemplate:
    """A checkpoint's template, or the operator's; never a client's. Thread-safe.

    Processes are started when they are needed, one for each thread that renders at the same time, and stay. One whose
    rendering exceeds the limits of `template_frames` is ended, and the next rendering starts another.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are offered to every rendering: the spellings of `bos_token`, `eos_token` and the like."""
        if len(source) > MAX_SOURCE_CHARS:
            raise _unusable(f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read")
        try:
            self._compile = encode(Compile(source, dict(variables)))
        except UnicodeEncodeError as error:
            raise _unusable(f"or a token's name has a lone surrogate ({error.reason})") from error
        self.source = source
        self._lock = threading.Lock()
        self._idle: list[TemplateProcess] = []
        self._processes: set[TemplateProcess] = set()
        weakref.finalize(self, _end_all, self._processes)

    def check(self) -> None:
        """Compile it, and keep the process for the first rendering. Raises ModelError where it does not compile, or not
        within the limits."""
        with self._process():
            pass

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Raises InvalidRequest where the template refuses these messages, fails, takes too long or writes too much."""
        try:
            question = encode(Render(messages, {**variables, "add_generation_prompt": add_generation_prompt}))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refused(f"takes only what JSON has ({error})") from error
        with self._process() as process:
            answer = process.ask(question, MAX_WAIT_S)
        if isinstance(answer, Rendered):
            return answer.text
        raise _refused(answer.why if isinstance(answer, Failed) else "gave no text")

    @contextlib.contextmanager
    def _process(self) -> Iterator[TemplateProcess]:
        """One for the caller alone, which has compiled the template. It is kept unless it has ended."""
        process = self._take_idle() or self._start()
        try:
            yield process
        except BaseException:
            self._drop(process)  # which question it answers next is not known
            raise
        if process.has_ended:
            self._drop(process)
            return
        with self._lock:
            self._idle.append(process)

    def _take_idle(self) -> TemplateProcess | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if not process.has_ended:
                    return process
                self._drop(process)
        return None

    def _start(self) -> TemplateProcess:
        process = TemplateProcess()
        self._processes.add(process)
        answer = process.ask(self._compile, MAX_START_S)
        if isinstance(answer, Failed):
            self._drop(process)
            raise _unusable(answer.why)
        return process

    def _drop(self, process: TemplateProcess) -> None:
        process.end()
        self._processes.discard(process)


def _end_all(processes: set[TemplateProcess]) -> None:
    for process in list(processes):
        process.end()


def _unusable(why: str) -> ModelError:
    return ModelError(f"the chat template {why}: give --chat-template")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template {why}", code="chat_template_error", param="messages")
