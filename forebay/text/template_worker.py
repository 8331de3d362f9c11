"""A chat template's own process: jinja2 in its immutable sandbox, with little memory, ended by the kernel after too
much CPU time. Templates come with checkpoints, so they are untrusted code.

    python -m forebay.text.template_worker FD      (started by `chat_template`; FD is its end of the socket pair)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.nodes import Assign, CallBlock, Filter, Name, Node, Template, Test
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.base.confined import serve
from forebay.text.template_frames import (
    LIMITS,
    MAX_OUTPUT_CHARS,
    Answer,
    Compile,
    Compiled,
    Failed,
    Question,
    Render,
    Rendered,
    decode_question,
    encode,
)


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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does, with the arguments in its order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    """With the globals that checkpoints' templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _variables(tree: Template) -> set[str]:
    """Return the names that a template reads of what it is given. A name that it sets itself, in some branch, counts if
    the template looks first whether it is given."""
    stored = {name.name for name in tree.find_all(Name) if name.ctx == "store"}
    looks: list[Node | None] = [
        test.node for test in tree.find_all(Test) if test.name in ("defined", "undefined", "none")
    ]
    looks += [found.node for found in tree.find_all(Filter) if found.name in ("default", "d")]
    for assign in tree.find_all(Assign):
        looks += [name for name in [assign.node, *assign.node.find_all(Name)] if name == _read(assign.target)]
    given = {node.name for node in looks if isinstance(node, Name)}
    return meta.find_undeclared_variables(tree) - (stored - given)


def _read(target: Node) -> Node | None:
    """Return the reading of the name that is assigned to."""
    return Name(target.name, "load") if isinstance(target, Name) else None


class Worker:
    """Answers questions one after the other. The first one is `Compile`."""

    def __init__(self) -> None:
        self._template: jinja2.Template | None = None
        self._variables: dict[str, str] = {}

    def answer(self, question: Question) -> Answer:
        """Compile or render; every failure, running out of memory included, becomes a `Failed`."""
        try:
            return self._compile(question) if isinstance(question, Compile) else self._render(question)
        except jinja2.TemplateSyntaxError as error:
            return Failed(f"does not compile (line {error.lineno}: {error.message})")
        except (_Refused, jinja2.TemplateError) as error:
            return Failed(f"refused these messages: {str(error)[:300]}")
        except MemoryError:
            return Failed(f"needs more than {LIMITS.memory_bytes >> 20} MiB of memory")
        except Exception as error:
            return Failed(
                f"failed on these messages ({type(error).__name__}): it may not support what they contain; "
                "--chat-template sets another one"
            )

    def _compile(self, question: Compile) -> Answer:
        self._variables = question.variables
        environment = _environment()
        try:
            self._template = environment.from_string(question.source)
            read = _variables(environment.parse(question.source))
        except (RecursionError, ValueError, ArithmeticError) as error:
            return Failed(f"does not compile ({type(error).__name__})")
        return Compiled(sorted(read - environment.globals.keys()))

    def _render(self, question: Render) -> Answer:
        if self._template is None:
            return Failed("has not been compiled")
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate({**self._variables, **question.variables, "messages": question.messages}):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                return Failed(f"wrote more than {MAX_OUTPUT_CHARS} characters: send fewer or shorter messages")
        return Rendered("".join(pieces))


def _encoded(answer: Answer) -> bytes:
    try:
        return encode(answer)
    except UnicodeEncodeError:
        return encode(Failed("wrote a lone surrogate: that is not valid Unicode"))


if __name__ == "__main__":
    worker = Worker()
    serve(int(sys.argv[1]), LIMITS, lambda question: _encoded(worker.answer(decode_question(question))))
