"""A grammar while it is written, in llguidance's Lark notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import compilable, json_options
from forebay.grammar.quoted import quoted
from forebay.text.token_bytes import TokenBytes

_TERMINALS: Final = (r"TEXT: /(.|\n)*/", r"SPACE: /[ \r\n\t]{1,8}/")
_TOKEN_LIKE: Final = re.compile(r"(<[^<>]+>)")  # how tokens within a longer marker are spelled

Schema: TypeAlias = Mapping[str, Any]


class CallRule(NamedTuple):
    """A tool that may be called. If it is `enforced`, its arguments match `parameters`, which is a schema that
    compiles; otherwise they are any object. `field` is the client's field of that schema. Of a tool that takes one
    text, `text` is the Lark grammar of it, if it has one."""

    name: str
    parameters: Schema
    enforced: bool
    field: str
    text: str = ""


def literal(text: str) -> str:
    """Return the text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def cannot(what: str, param: str) -> InvalidRequest:
    """Return the error for tools that no grammar can enforce; `param` names the field of the request."""
    return InvalidRequest(what, code="grammar_invalid", param=param)


def as_pattern(text: str) -> str:
    """A regular expression of a text, as a Lark terminal has it."""
    return "".join(rf"\x{ord(char):02x}" if char in "\n/" else re.escape(char) for char in text)


def last_token(table: TokenBytes, spelling: str) -> tuple[str, int | None]:
    """Return the added token that ends a marker, if one does, and the text of the marker before it."""
    if (token := table.added(spelling)) is not None:
        return "", token
    *head, last = (piece for piece in _TOKEN_LIKE.split(spelling) if piece)
    return "".join(head), table.added(last) if head else None


@dataclass(slots=True)
class Lark:
    """A grammar while it is written."""

    table: TokenBytes
    rules: list[str] = field(default_factory=lambda: list(_TERMINALS))
    grammars: list[dict[str, str]] = field(default_factory=list)  # of others, which the rules name

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule that says so."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def marker(self, spelling: str) -> str:
        """Return the terminal of a marker: the added token if the vocabulary has one, its text otherwise."""
        if (token := self.table.added(spelling)) is not None:
            return f"<[{token}]>"
        pieces = [(piece, self.table.added(piece)) for piece in _TOKEN_LIKE.split(spelling) if piece]
        if all(token is None for _, token in pieces):
            return literal(spelling)
        return " ".join(literal(piece) if token is None else f"<[{token}]>" for piece, token in pieces)

    def as_text(self, *spellings: str) -> str:
        """Return a pattern of those markers that free text can hold: all but special tokens, which are never text."""
        special = (self.table.added(spelling) in self.table.skipped for spelling in spellings)
        return "|".join(as_pattern(each) for each, never in zip(spellings, special, strict=True) if not never)

    def without(self, pattern: str) -> str:
        """The name of a terminal: free text in which nothing matches; the pattern "" stands for nothing."""
        if not pattern:
            return "TEXT"
        name = f"T{len(self.rules)}"
        self.rules.append(rf"{name}: /(.|\n)*/ & ~/(.|\n)*({pattern})(.|\n)*/")
        return name

    def line(self, text: str) -> str:
        """The name of a terminal: a line of that text, behind white space."""
        name = f"T{len(self.rules)}"
        self.rules.append(rf"{name}: /[ \r\n\t]{{0,8}}{as_pattern(text)}\n/")
        return name

    def without_lines(self, lines: Sequence[str], words: Sequence[str]) -> str:
        """The name of a terminal: free text that has none of these lines, and none of the words that text can hold."""
        name = f"T{len(self.rules)}"
        either = "|".join(map(as_pattern, lines))
        word = self.as_text(*words)
        others = rf" & ~/(.|\n)*({word})(.|\n)*/" if word else ""
        self.rules.append(rf"{name}: /(.|\n)*/ & ~/((.|\n)*\n)?[ \r\t]*({either})\n(.|\n)*/{others}")
        return name

    def ending(self, end: str, pattern: str) -> str:
        """The name of a terminal: text that ends so, and in which nothing matches."""
        name = f"T{len(self.rules)}"
        without = rf" & ~/(.|\n)*({pattern})(.|\n)*/" if pattern else ""
        self.rules.append(rf"{name}: /(.|\n)*{as_pattern(end)}/{without}")
        return name

    def other_than(self, first: str, pattern: str) -> str:
        """The name of a terminal: text that does not begin so, behind white space, and in which nothing matches."""
        name = f"T{len(self.rules)}"
        self.rules.append(rf"{name}: /(\s*[^\s\{first}](.|\n)*)?/ & ~/(.|\n)*({pattern})(.|\n)*/")
        return name

    def until(self, spelling: str, max_tokens: int | None = None, *, without: str = "") -> str:
        """Free text of a limited length, with nothing that matches `without`, and the marker behind it."""
        head, token = last_token(self.table, spelling)
        if token is not None and not head:
            without = "|".join(filter(None, (without, self.as_text(spelling))))
        text = self.ending(head, without) if token is not None and head else self.without(without)
        if token is None and max_tokens is not None:
            raise cannot(f"{spelling} is no token of this model's, so it cannot be forced", "max_thinking_tokens")
        if token is None:
            return self.rule(f"{text} {literal(spelling)}", "[lazy]")
        if max_tokens == 0:
            return f"<[{token}]>"
        return f"{self.rule(text, '' if max_tokens is None else f'[max_tokens={max_tokens}]')} <[{token}]>"

    def json(self, schema: Schema) -> str:
        """Add a rule for JSON values of the schema, and return its name."""
        offered = compilable({**schema, "x-guidance": json_options(schema)})
        return self.rule(f"%json {_compact(offered)}")

    def embedded(self, source: str) -> str:
        """The name of a grammar within this one."""
        name = f"text{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": source})
        return f"@{name}"

    def quoted(self, text: str, field: str) -> str:
        """A JSON string of what the grammar `text` says."""
        return f"{literal(chr(34))} {self.embedded(quoted(text, field))} {literal(chr(34))}"

    def arguments(self, call: CallRule) -> str:
        """Add a rule for the arguments object of a call, and return its name."""
        if call.text:
            head = f"{{{literal(next(iter(call.parameters['properties'])))}: "
            return self.rule(f'{literal(head)} {self.quoted(call.text, call.field)} "}}"')
        return self.json({"type": "object", **call.parameters} if call.enforced else {"type": "object"})

    def one_of(self, bodies: Sequence[str]) -> str:
        """Add a rule that matches any of the bodies, and return its name."""
        return self.rule(" | ".join(map(self.rule, bodies)))

    def some(self, item: str, between: str, one: bool) -> str:
        """Return an expression for one item, or with `one` false for one or more that `between` separates."""
        return item if one else f"{item} ({literal(between)} {item})*" if between else f"{item}+"
