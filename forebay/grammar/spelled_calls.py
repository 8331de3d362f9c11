"""How models spell calls of tools, as rules: what `text.answers.calls` reads is written here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import compilable, json_options
from forebay.grammar.quoted import quoted
from forebay.text.answers.calls import Tagged, is_text, resolved
from forebay.text.answers.formats import CALL_FORMATS, CallFormat
from forebay.text.token_bytes import TokenBytes

_TERMINALS: Final = (r"TEXT: /(.|\n)*/", r"SPACE: /[ \r\n\t]{1,8}/")
_FENCE: Final = "\n```json\n"
_LINE: Final = r'"\n"'
_ANY_KEY: Final = r"/[^<>\"\n]+/"  # between tags
_PYTHON: Final = (  # keyword arguments of any values
    'keywords: (keyword (", " keyword)*)?',
    'keyword: /[A-Za-z_][A-Za-z0-9_]*/ "=" python',
    'python: "True" | "False" | "None" | P_NUMBER | P_TEXT | p_list | p_dict',
    'p_list: "[" (python (", " python)*)? "]"',
    'p_dict: "{" (p_item (", " p_item)*)? "}"',
    'p_item: P_TEXT ": " python',
    r"P_NUMBER: /-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    r"""P_TEXT: /'([^'\\\n]|\\[^\n])*'|"([^"\\\n]|\\[^\n])*"/""",
)
_NOT_IN_TEXT: Final = ("pattern", "format", "minLength", "maxLength")

Schema: TypeAlias = Mapping[str, Any]


class CallRule(NamedTuple):
    """A tool that may be called. If it is `enforced`, its arguments are what `parameters` say, which is a schema that
    compiles; otherwise they are any object. `field` is where the client has said that. Of a tool that takes one text,
    `text` is the Lark grammar of it, if it has one."""

    name: str
    parameters: Schema
    enforced: bool
    field: str
    text: str = ""


class Spelled(NamedTuple):
    """`section` is what stands behind the first marker; `between`, between two that have a marker each, None where one
    section has all calls."""

    section: str
    between: str | None = None


Spell: TypeAlias = Callable[["Lark", Sequence[CallRule], bool], Spelled]
"""With the flag, one call alone."""


def literal(text: str) -> str:
    """Return the text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def cannot(what: str, param: str) -> InvalidRequest:
    """Return the error for tools that no grammar can enforce; `param` names the field of the request."""
    return InvalidRequest(what, code="grammar_invalid", param=param)


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
        token = self.table.added(spelling)
        return literal(spelling) if token is None else f"<[{token}]>"

    def without(self, pattern: str) -> str:
        """The name of a terminal: free text in which nothing matches; the pattern "" stands for nothing."""
        if not pattern:
            return "TEXT"
        name = f"T{len(self.rules)}"
        self.rules.append(rf"{name}: /(.|\n)*/ & ~/(.|\n)*({pattern})(.|\n)*/")
        return name

    def other_than(self, first: str, pattern: str) -> str:
        """The name of a terminal: text that does not begin so, behind white space, and in which nothing matches."""
        name = f"T{len(self.rules)}"
        self.rules.append(rf"{name}: /(\s*[^\s\{first}](.|\n)*)?/ & ~/(.|\n)*({pattern})(.|\n)*/")
        return name

    def until(self, spelling: str, max_tokens: int | None = None, *, without: str = "") -> str:
        """Free text, at most so much of it and with nothing that matches `without`, and the marker behind it."""
        token, text = self.table.added(spelling), self.without(without)
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


# -- JSON --------------------------------------------------------------------------------------------------------------


def _object(lark: Lark, calls: Sequence[CallRule], key: str = "arguments") -> str:
    heads = (literal(f'{{"name": {literal(call.name)}, "{key}": ') for call in calls)
    return lark.one_of([f'{head} {lark.arguments(call)} "}}"' for head, call in zip(heads, calls, strict=True)])


def _hermes(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f'"\\n" {_object(lark, calls)} "\\n" {lark.marker("</tool_call>")}', "\n")


def _hunyuan(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f'"[" {lark.some(_object(lark, calls), ", ", one)} "]" {lark.marker("</tool_calls>")}')


def _llama3_json(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(lark.some(_object(lark, calls, "parameters"), "; ", one))


def _mistral(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    if lark.table.added("[ARGS]") is None:
        return Spelled(f'"[" {lark.some(_object(lark, calls), ", ", one)} "]"')
    behind = lark.marker("[ARGS]")
    return Spelled(lark.one_of([f"{literal(call.name)} {behind} {lark.arguments(call)}" for call in calls]), "")


@dataclass(frozen=True, slots=True)
class _Sections:
    """Between markers: calls, and around each a head that `head` writes of the name, JSON, `tail`."""

    form: str
    head: Callable[[Lark, str], str]
    tail: str = ""
    between: str = ""

    def __call__(self, lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
        form = CALL_FORMATS[self.form]
        begin, end, ends = map(lark.marker, (form.before, *form.after[-2:]))
        each = [f"{begin} {self.head(lark, call.name)} {lark.arguments(call)} {self.tail} {end}" for call in calls]
        return Spelled(f"{lark.some(lark.one_of(each), self.between, one)} {ends}")


def _deepseek_v3(lark: Lark, name: str) -> str:
    return f'"function" {lark.marker("<｜tool▁sep｜>")} {literal(f"{name}{_FENCE}")}'


def _deepseek_v31(lark: Lark, name: str) -> str:
    return f"{literal(name)} {lark.marker('<｜tool▁sep｜>')}"


def _kimi_k2(lark: Lark, name: str) -> str:
    return f"{literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {lark.marker('<|tool_call_argument_begin|>')}"


# -- values one by one -------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    key: str
    schema: Schema
    optional: bool
    is_text: bool
    text: str = ""  # the grammar of a tool's one text


def _members(call: CallRule) -> list[_Member]:
    """Return the arguments of an enforced call, in the order of the schema, which is theirs in the answer."""
    properties = call.parameters.get("properties")
    if not isinstance(properties, dict):
        return []
    required = call.parameters.get("required")
    shared = {name: call.parameters[name] for name in ("$defs", "definitions") if name in call.parameters}
    found = []
    for key, schema in properties.items():
        schema = resolved(schema, call.parameters)
        own = {**schema, **shared} if isinstance(schema, dict) else {}
        found.append(_Member(key, own, key not in (required or ()), is_text(call.parameters, key), call.text))
    return found


def _options(schema: Schema) -> Iterator[Schema]:
    """A schema and its alternatives, as `is_text` looks at them."""
    yield schema
    for word in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(word) or ():
            yield from _options(option) if isinstance(option, dict) else ()


def _texts(options: Sequence[Schema]) -> list[str]:
    """The texts that the options allow; none if one of them allows any text."""
    free = [option for option in options if option.get("type") == "string" and not _choices(option)]
    listed = [text for option in options for text in _choices(option) if isinstance(text, str)]
    nested = [option for option in free if not any(word in option for word in ("anyOf", "oneOf", "allOf"))]
    return [] if nested else listed


def _pattern(text: str) -> str:
    """A regular expression of a text, as a Lark terminal has it."""
    return "".join(rf"\x{ord(char):02x}" if char in "\n/" else re.escape(char) for char in text)


def call_in_text(form: CallFormat, names: Sequence[str]) -> str:
    """Return the beginning of a call of one of these tools, for readers that accept calls without a marker."""
    either = "|".join(map(_pattern, names))
    match form.name:
        case "qwen3_coder":
            return rf"<function=\s*({either})\s*>"
        case "minimax_m2":
            return rf"<invoke name=\"\s*({either})\s*\">"
        case "llama3_json":
            return rf'\{{\s*"name"\s*:\s*"({either})"'
        case "pythonic":
            return rf"\[\s*({either})\("
    return ""


def _choices(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or ())


@dataclass(frozen=True, slots=True)
class _Tags:
    """Keys and values between tags, each pair from a line of its own on; text as it is."""

    form: str

    def __call__(self, lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
        tags = CALL_FORMATS[self.form].body
        assert isinstance(tags, Tagged), self.form
        ends = f"{_LINE} {lark.marker(CALL_FORMATS[self.form].after[0])}" if tags.opens else ""
        each = []
        for call in calls:
            head = f"\n{tags.opens}{call.name}{tags.opened[0]}\n" if tags.opens else f"{call.name}\n"
            members = self._arguments(lark, tags, call) if call.enforced else f"{self._any_member(lark, tags)}*"
            each.append(f"{literal(head)} {members} {lark.marker(tags.closes)} {ends}")
        return Spelled(lark.one_of(each), "\n")

    def _arguments(self, lark: Lark, tags: Tagged, call: CallRule) -> str:
        made = ((self._member(lark, tags, call, member), member.optional) for member in _members(call))
        return " ".join(f"{rule}{'?' if optional else ''}" for rule, optional in made)

    def _member(self, lark: Lark, tags: Tagged, call: CallRule, member: _Member) -> str:
        end = self._end(tags)
        return self._pair(lark, tags, literal(member.key), self._value(lark, tags, call, member, end))

    def _any_member(self, lark: Lark, tags: Tagged) -> str:
        return self._pair(lark, tags, _ANY_KEY, self._any_text(lark, tags, self._end(tags)))

    def _pair(self, lark: Lark, tags: Tagged, key: str, value: str) -> str:
        """Add a rule for an argument: its key, and its value with the tag that ends it."""
        if tags.value:
            between = f"{lark.marker(tags.key_end)} {_LINE} {lark.marker(tags.value)}"
        else:
            between = literal(f"{tags.key_end}\n" if tags.lines else tags.key_end)
        return lark.rule(f"{lark.marker(tags.key)} {key} {between} {value} {_LINE}")

    def _end(self, tags: Tagged) -> str:
        return f"\n{tags.value_end}" if tags.lines else tags.value_end

    def _any_text(self, lark: Lark, tags: Tagged, end: str) -> str:
        return lark.until(end, without="|".join(map(_pattern, tags.ends_inside)))

    def _value(self, lark: Lark, tags: Tagged, call: CallRule, member: _Member, end: str) -> str:
        if member.text:
            return f"{lark.embedded(member.text)} {lark.marker(end)}"
        if not member.is_text:
            return f"{lark.json(member.schema)} {lark.marker(end)}"
        options = list(_options(member.schema))
        unread = next((word for word in _NOT_IN_TEXT for option in options if word in option), None)
        if unread is not None:
            what = f"{unread} of {member.key} cannot be enforced where arguments are text: leave it out, or strict"
            raise cannot(what, call.field)
        if texts := _texts(options):
            return f"({' | '.join(map(literal, texts))}) {lark.marker(end)}"
        return self._any_text(lark, tags, end)


def _python(lark: Lark, calls: Sequence[CallRule], one: bool, *, end: str = "") -> Spelled:
    """`[name(key=value, ...), ...]`."""
    each = [f'{literal(f"{call.name}(")} {_keywords(lark, call)} ")"' for call in calls]
    return Spelled(f'"[" {lark.some(lark.one_of(each), ", ", one)} "]" {lark.marker(end) if end else ""}')


def _keywords(lark: Lark, call: CallRule) -> str:
    """Return an expression for the arguments, in their order, with commas between those that are there. Without
    enforcement they are any keywords."""
    if not call.enforced:
        lark.rules += _PYTHON if _PYTHON[0] not in lark.rules else ()
        return "keywords"
    first, more = '""', '""'
    for member in reversed(_members(call)):
        own = lark.quoted(member.text, call.field) if member.text else _python_value(lark, member.schema)
        value = f"{literal(f'{member.key}=')} {own}"
        alone, behind = f"{value} {more}", f'", " {value} {more}'
        first = lark.rule(f"{alone} | {first}" if member.optional else alone)
        more = lark.rule(f"{behind} | {more}" if member.optional else behind)
    return first


def _python_value(lark: Lark, schema: Schema) -> str:
    """JSON, but for the names of what is neither text nor number."""
    names = {"True": True, "False": False, "None": None}
    if choices := _choices(schema):
        literals = (next((name for name, it in names.items() if it is value), None) for value in choices)
        pairs = zip(literals, choices, strict=True)
        return f"({' | '.join(literal(name or json.dumps(value, ensure_ascii=False)) for name, value in pairs)})"
    if schema.get("type") == "boolean":
        return '("True" | "False")'
    return '"None"' if schema.get("type") == "null" else lark.json(schema)


SPELLED: Final[dict[str, Spell]] = {
    "hermes": _hermes,
    "hunyuan": _hunyuan,
    "qwen3_coder": _Tags("qwen3_coder"),
    "glm45": _Tags("glm45"),
    "minimax_m2": _Tags("minimax_m2"),
    "mistral": _mistral,
    "deepseek_v3": _Sections("deepseek_v3", _deepseek_v3, tail=literal("\n```"), between="\n"),
    "deepseek_v31": _Sections("deepseek_v31", _deepseek_v31),
    "kimi_k2": _Sections("kimi_k2", _kimi_k2),
    "lfm2": partial(_python, end="<|tool_call_end|>"),
    "pythonic": _python,
    "llama3_json": _llama3_json,
}
