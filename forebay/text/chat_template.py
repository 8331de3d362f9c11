"""Chat templates, rendered in processes of their own that can be ended: they are programs, and not ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Final

from forebay.base.confined import ConfinedProcess, NoAnswer, Processes
from forebay.base.errors import InvalidRequest, ModelError
from forebay.text.template_frames import (
    LIMITS,
    Answer,
    Compile,
    Compiled,
    Failed,
    Render,
    Rendered,
    decode_answer,
    encode,
)

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_WAIT_S: Final = 20.0  # by the clock, for what the processor may take `LIMITS.cpu_s` for
MAX_START_S: Final = 60.0  # the same for a process that is yet to import jinja2
# transformers' apply_chat_template passes these to every template: `{% if tools is not none %}` asks for tools.
_ALWAYS_PASSED: Final = {"tools": None, "documents": None}
_READS_PARTS: Final = re.compile(r"""\[\s*['"]type['"]\s*\]|\.type\b|selectattr""")
_PROBE: Final = "Probe."


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
            compile_it = encode(Compile(source, dict(variables)))
        except UnicodeEncodeError as error:
            raise _unusable(f"or a token's name has a lone surrogate ({error.reason})") from error
        self.source = source
        self._variables: frozenset[str] | None = None  # once it has compiled
        self._processes = Processes(partial(self._started, compile_it))
        self._images: dict[str, bool] = {}

    def check(self) -> None:
        """Compile it, and keep the process for the first rendering. Raises ModelError if it does not compile within the
        limits."""
        with self._processes.one():
            pass

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that it reads. Raises what `check` raises."""
        if self._variables is None:
            self.check()
        return self._variables or frozenset()

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Raises InvalidRequest where the template refuses these messages, fails, takes too long or writes too much."""
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        return self._render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def writes_images(self, token: str) -> bool:
        """Return whether the template writes `token` for an image among the parts of a message. Those of models that
        read texts alone fail, or write the list itself."""
        if token not in self._images:
            self._images[token] = self._shows([{"type": "image"}, _part(_PROBE)], token)
        return self._images[token]

    def _started(self, compile_it: bytes) -> TemplateProcess:
        """A process that has compiled the template."""
        process = TemplateProcess()
        try:
            answer = process.ask(compile_it, MAX_START_S)
            if isinstance(answer, Failed):
                raise _unusable(answer.why)
        except BaseException:
            process.end()
            raise
        self._variables = frozenset(answer.variables) if isinstance(answer, Compiled) else frozenset()
        return process

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template shows words only in a list of parts, as those of some models with images do."""
        if _READS_PARTS.search(self.source) is None:
            return False
        return not self._shows(_PROBE, _PROBE) and self._shows([_part(_PROBE)], _PROBE)

    def _shows(self, content: Any, text: str) -> bool:
        try:
            return text in self._render([{"role": "user", "content": content}], add_generation_prompt=True)
        except InvalidRequest:
            return False

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        try:
            question = encode(
                Render(messages, {**_ALWAYS_PASSED, **variables, "add_generation_prompt": add_generation_prompt})
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refused(f"takes only what JSON has ({error})") from error
        with self._processes.one() as process:
            answer = process.ask(question, MAX_WAIT_S)
        if isinstance(answer, Rendered):
            return answer.text
        raise _refused(answer.why if isinstance(answer, Failed) else "gave no text")


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [_part(content)]} if isinstance(content, str) else message


def _unusable(why: str) -> ModelError:
    return ModelError(f"the chat template {why}: give --chat-template")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template {why}", code="chat_template_error", param="messages")


class TemplateProcess(ConfinedProcess):
    """Client of the confined process that compiles and renders one chat template."""

    def __init__(self) -> None:
        super().__init__("forebay.text.template_worker", LIMITS, "the chat template")

    def ask(self, question: bytes, timeout_s: float) -> Answer:
        """Return the answer to an encoded question. If the process ends without one, return a `Failed` of our own."""
        try:
            return decode_answer(self.exchange(question, timeout_s))
        except NoAnswer as error:
            return Failed(str(error))
