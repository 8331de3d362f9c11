"""Chat templates: jinja2 in its immutable sandbox, with the globals that checkpoints' templates expect."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.base.errors import InvalidRequest, ModelError

MAX_OUTPUT_CHARS: Final = 4 << 20
MAX_RENDER_S: Final = 1.0


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Refused(Exception):
    """The template itself called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A compiled template. Thread-safe. `source` is the operator's or the checkpoint's, never a client's."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are offered to every rendering: the spellings of `bos_token`, `eos_token` and the like."""
        self.source = source
        self._variables = dict(variables)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template does not compile (line {error.lineno}: {error.message}): give --chat-template"
            ) from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Raises InvalidRequest where the template refuses these messages, fails, or writes too much."""
        pieces: list[str] = []
        size = 0
        deadline = time.monotonic() + MAX_RENDER_S
        context = {
            **self._variables,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS or time.monotonic() > deadline:
                    raise InvalidRequest(
                        f"the chat template wrote {size} characters or took longer than {MAX_RENDER_S:g} s; "
                        f"at most {MAX_OUTPUT_CHARS} are allowed: send fewer or shorter messages",
                        code="chat_template_error",
                        param="messages",
                    )
        except (_Refused, jinja2.TemplateError) as error:
            raise InvalidRequest(
                f"the chat template refused these messages: {str(error)[:300]}",
                code="chat_template_error",
                param="messages",
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template failed on these messages ({type(error).__name__}): it may not support what they "
                "contain; --chat-template sets another one",
                code="chat_template_error",
                param="messages",
            ) from error
        return "".join(pieces)
