"""How models spell calls of tools, as rules: what `text.answers.calls` reads is written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.grammar.lark import CallRule, Lark, Schema, as_pattern, cannot, literal
from forebay.text.answers.argument_types import ArgumentType, argument_type, resolved, subschemas, texts_of
from forebay.text.answers.formats import CALL_FORMATS, CallFormat
from forebay.text.answers.gemma_calls import TEXT_MARK
from forebay.text.answers.tagged_calls import Tagged

_FENCE: Final = "\n```json\n"
_LINE: Final = r'"\n"'
_COHERE_ID: Final = '{"tool_call_id": "'
_COHERE_OPENS, _COHERE_CLOSES = "[\n    ", "\n]"
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


class Spelled(NamedTuple):
    """`section` is the text behind the first marker; `between`, between two calls that have a marker each, None if one
    section has all calls."""

    section: str
    between: str | None = None


Spell: TypeAlias = Callable[["Lark", Sequence[CallRule], bool], Spelled]
"""With the flag, one call alone."""


# -- JSON --------------------------------------------------------------------------------------------------------------


def objects(lark: Lark, calls: Sequence[CallRule], key: str = "arguments", name: str = "name") -> str:
    """Return an expression of one call as JSON, with these names of its members."""
    heads = (literal(f'{{"{name}": {literal(call.name)}, "{key}": ') for call in calls)
    return lark.one_of([f'{head} {lark.arguments(call)} "}}"' for head, call in zip(heads, calls, strict=True)])


def _hermes(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f'"\\n" {objects(lark, calls)} "\\n" {lark.marker("</tool_call>")}', "\n")


def in_list(
    lark: Lark, calls: Sequence[CallRule], one: bool, *, end: str, key: str = "arguments", name: str = "name"
) -> Spelled:
    """Write a JSON list of calls, up to the marker `end`."""
    return Spelled(f'"[" {lark.some(objects(lark, calls, key, name), ", ", one)} "]" {lark.marker(end)}')


def _apertus(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    """Each call is an object with one member, the name of its tool."""
    heads = [literal(f"{{{literal(call.name)}: ") for call in calls]
    each = [f'{head} {lark.arguments(call)} "}}"' for head, call in zip(heads, calls, strict=True)]
    return Spelled(f'"[" {lark.some(lark.one_of(each), ", ", one)} "]" {lark.marker("<|tools_suffix|>")}')


def _cohere(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    number = f"{literal(_COHERE_ID)} /[0-9]{{1,3}}/"
    heads = [literal(f'", "tool_name": {literal(call.name)}, "parameters": ') for call in calls]
    each = [f'{number} {head} {lark.arguments(call)} "}}"' for head, call in zip(heads, calls, strict=True)]
    listed = lark.some(lark.one_of(each), ",\n    ", one)
    return Spelled(f"{literal(_COHERE_OPENS)} {listed} {literal(_COHERE_CLOSES)} {lark.marker('<|END_ACTION|>')}")


def _command_r(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    listed = in_list(lark, calls, one, end="", key="parameters", name="tool_name")
    return Spelled(f"{_LINE} {listed.section} {_LINE} {literal('```')}")


def _internlm(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    form = CALL_FORMATS["internlm"]
    body = objects(lark, calls, "parameters")
    return Spelled(f"{lark.marker(form.before)} {_LINE} {body} {lark.marker(form.after[0])}", "")


def _phi4_mini(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f'{lark.some(objects(lark, calls), ", ", one)} "]"')


def _longcat(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f"{_LINE} {objects(lark, calls)} {_LINE} {lark.marker('</longcat_tool_call>')}", "\n")


def _gigachat3(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(f'"\\n" {objects(lark, calls)}')


def _llama3_json(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    return Spelled(lark.some(objects(lark, calls, "parameters"), "; ", one))


def _glm4(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    """One call: the model was trained on no others."""
    return Spelled(lark.one_of([f"{literal(f'{call.name}{chr(10)}')} {lark.arguments(call)}" for call in calls]))


def _mistral(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    if lark.table.added("[ARGS]") is None:
        return Spelled(f'"[" {lark.some(objects(lark, calls), ", ", one)} "]"')
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


def _solar_open(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    """The first marker is that of all calls; each has an id, which no one reads."""
    form = CALL_FORMATS["solar_open"]
    begin, name, arguments, end = map(lark.marker, (form.before, *form.inside, form.after[0]))
    each = [
        f"{begin} /[a-z0-9]{{1,10}}/ {name} {literal(call.name)} {arguments} {lark.arguments(call)} {end}"
        for call in calls
    ]
    return Spelled(f"{lark.some(lark.one_of(each), '', one)} ({lark.marker(form.after[1])})?")


# -- values one by one -------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """Argument of a tool, as far as its rule depends on it."""

    key: str
    schema: Schema
    optional: bool
    kind: ArgumentType
    texts: Sequence[str] | None  # all that it takes, if it is a text; None for any
    limit: str = ""  # the word of the schema that limits a text otherwise
    text: str = ""  # the grammar of a tool's one text


def arguments_of(call: CallRule) -> list[Member]:
    """Return the arguments of an enforced call, in the order of the schema, which is theirs in the answer."""
    properties = call.parameters.get("properties")
    if not isinstance(properties, dict):
        return []
    required = call.parameters.get("required")
    shared = {name: call.parameters[name] for name in ("$defs", "definitions") if name in call.parameters}
    found = []
    for key, schema in properties.items():
        root, schema = call.parameters, resolved(schema, call.parameters)
        own = {**schema, **shared} if isinstance(schema, dict) else {}
        parts = list(subschemas(own, root))
        limit = next((word for word in _NOT_IN_TEXT for part in parts if word in part), "")
        optional = key not in (required or ())
        found.append(Member(key, own, optional, argument_type(root, key), texts_of(own, root), limit, call.text))
    return found


def call_in_text(form: CallFormat, names: Sequence[str]) -> str:
    """Return the beginning of a call of one of these tools, for readers that accept calls without a marker."""
    either = "|".join(map(as_pattern, names))
    match form.name:
        case "qwen3_coder" | "mimo" | "seed_oss":
            return rf"<function=\s*({either})\s*>"
        case "minimax_m2":
            return rf"<invoke name=\"\s*({either})\s*\">"
        case "deepseek_v32" | "deepseek_v4":
            return rf"<｜DSML｜invoke name=\"\s*({either})\s*\">"
        case "xlam":
            return rf'(```json\s*\[?|\[)\s*\{{\s*"name"\s*:\s*"({either})"'
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
        heads = [f"\n{tags.opens}{call.name}{tags.opened[0]}\n" if tags.opens else f"{call.name}\n" for call in calls]
        each = [f"{self.call(lark, tags, call, literal(head))} {ends}" for call, head in zip(calls, heads, strict=True)]
        return Spelled(lark.one_of(each), "\n")

    def call(self, lark: Lark, tags: Tagged, call: CallRule, head: str) -> str:
        """Return an expression of one call behind its `head`, with the tag that closes it."""
        arguments = self._arguments(lark, tags, call) if call.enforced else f"{self._any_member(lark, tags)}*"
        return f"{head} {arguments} {lark.marker(tags.closes)}"

    def _arguments(self, lark: Lark, tags: Tagged, call: CallRule) -> str:
        made = ((self._member(lark, tags, call, member), member.optional) for member in arguments_of(call))
        return " ".join(f"{rule}{'?' if optional else ''}" for rule, optional in made)

    def _member(self, lark: Lark, tags: Tagged, call: CallRule, member: Member) -> str:
        end = self._end(tags)
        value = tagged_value(lark, call, member, lark.marker(end), partial(self._any_text, lark, tags, end))
        is_text = member.kind.text and not member.kind.nullable
        return self._pair(lark, tags, literal(member.key), value, text=is_text or bool(member.text))

    def _any_member(self, lark: Lark, tags: Tagged) -> str:
        value = self._any_text(lark, tags, self._end(tags))
        pairs = [self._pair(lark, tags, _ANY_KEY, value, text=text) for text in (True, False)]
        return f"({' | '.join(pairs)})" if tags.text_end else pairs[0]

    def _pair(self, lark: Lark, tags: Tagged, key: str, value: str, *, text: bool = True) -> str:
        """Add a rule for an argument: its key, and its value with the tag that ends it."""
        key_end = tags.text_end if text and tags.text_end else tags.key_end
        if tags.value:
            between = f"{lark.marker(key_end)} {_LINE} {lark.marker(tags.value)}"
        else:
            between = literal(f"{key_end}\n" if tags.lines else key_end)
        return lark.rule(f"{lark.marker(tags.key)} {key} {between} {value} {_LINE}")

    def _end(self, tags: Tagged) -> str:
        return f"\n{tags.value_end}" if tags.lines else tags.value_end

    def _any_text(self, lark: Lark, tags: Tagged, end: str) -> str:
        return lark.until(end, without="|".join(map(as_pattern, tags.ends_inside)))


@dataclass(frozen=True, slots=True)
class _TagsInSection(_Tags):
    """Calls with a marker each, within the markers of all."""

    def __call__(self, lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
        form = CALL_FORMATS[self.form]
        tags = form.body
        assert isinstance(tags, Tagged), self.form
        heads = (
            f"{lark.marker(form.before)} {literal(call.name)} {lark.marker(tags.opened[0])} {_LINE}" for call in calls
        )
        each = [self.call(lark, tags, call, head) for call, head in zip(calls, heads, strict=True)]
        return Spelled(f"{_LINE} {lark.some(f'({lark.one_of(each)} {_LINE})', '', one)} {lark.marker(form.after[0])}")


def tagged_value(lark: Lark, call: CallRule, member: Member, end: str, any_text: Callable[[], str]) -> str:
    """Return an expression of a value without quotes, and of the tag `end` behind it; `any_text` makes one of texts."""
    if member.text:
        return f"{lark.embedded(member.text)} {end}"
    if not member.kind.text:
        return f"{lark.json(member.schema)} {end}"
    if member.limit:
        what = f"{member.limit} of {member.key} cannot be enforced where arguments are text: "
        raise cannot(f"{what}leave it out, or strict", call.field)
    if member.texts is not None:
        texts = [*member.texts, *(["null"] if member.kind.nullable else [])]
        return f"({' | '.join(map(literal, texts))}) {end}"
    return any_text()


def _gemma4(lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
    """`call:name{key:value,...}`; a text whose length or form is limited is written as JSON, which is read as well."""
    ends, each = CALL_FORMATS["gemma4"].after[0], []
    for call in calls:
        head = literal(f"call:{call.name}{{")
        members = f"{in_order(lark, call, ',', _gemma4_member)} {literal('}')} {lark.marker(ends)}"
        each.append(f"{head} {members if call.enforced else _any_gemma4(lark, ends)}")
    return Spelled(lark.one_of(each), "")


def _any_gemma4(lark: Lark, ends: str) -> str:
    texts = f"({lark.until(TEXT_MARK)})*" if lark.table.added(TEXT_MARK) is not None else ""
    return f"{texts} {lark.until('}' + ends)}"


def _gemma4_member(lark: Lark, call: CallRule, member: Member) -> str:
    key, mark = literal(f"{member.key}:"), lark.marker(TEXT_MARK)
    if member.text:
        return f"{key} {lark.quoted(member.text, call.field)}"
    if not member.kind.text or member.kind.nullable or member.limit:
        return f"{key} {lark.json(member.schema)}"
    if member.texts is not None:
        return f"{key} {mark} ({' | '.join(map(literal, member.texts))}) {mark}"
    return f"{key} {mark} {lark.until(TEXT_MARK)}"


def _python(lark: Lark, calls: Sequence[CallRule], one: bool, *, end: str = "") -> Spelled:
    """`[name(key=value, ...), ...]`."""
    each = [f'{literal(f"{call.name}(")} {keywords(lark, call)} ")"' for call in calls]
    return Spelled(f'"[" {lark.some(lark.one_of(each), ", ", one)} "]" {lark.marker(end) if end else ""}')


def _python_lines(lark: Lark, calls: Sequence[CallRule], one: bool, *, end: str) -> Spelled:
    """`name(key=value, ...)`, a line each."""
    each = [f'{literal(f"{call.name}(")} {keywords(lark, call)} ")"' for call in calls]
    return Spelled(f"{_LINE} {lark.some(lark.one_of(each), chr(10), one)} {_LINE} {lark.marker(end)}")


def keywords(lark: Lark, call: CallRule) -> str:
    """Return an expression for the arguments. Without enforcement they are any keywords."""
    if call.enforced:
        return in_order(lark, call, ", ", _keyword)
    lark.rules += _PYTHON if _PYTHON[0] not in lark.rules else ()
    return "keywords"


def in_order(lark: Lark, call: CallRule, between: str, write: Callable[[Lark, CallRule, Member], str]) -> str:
    """Members in their order, with `between` those that are there."""
    first, more = '""', '""'
    for member in reversed(arguments_of(call)):
        value = write(lark, call, member)
        alone, behind = f"{value} {more}", f"{literal(between)} {value} {more}"
        first = lark.rule(f"{alone} | {first}" if member.optional else alone)
        more = lark.rule(f"{behind} | {more}" if member.optional else behind)
    return first


def _keyword(lark: Lark, call: CallRule, member: Member) -> str:
    own = lark.quoted(member.text, call.field) if member.text else _python_value(lark, member.schema)
    return f"{literal(f'{member.key}=')} {own}"


def _python_value(lark: Lark, schema: Schema) -> str:
    """JSON, except for the names of values that are neither text nor number."""
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
    "granite": partial(in_list, end=""),
    "apertus": _apertus,
    "cohere": _cohere,
    "command_r": _command_r,
    "internlm": _internlm,
    "phi4_mini": _phi4_mini,
    "longcat": _longcat,
    "solar_open": _solar_open,
    "deepseek_v32": _Tags("deepseek_v32"),
    "deepseek_v4": _Tags("deepseek_v4"),
    "hy_v3": _TagsInSection("hy_v3"),
    "hy_v3_opensource": _TagsInSection("hy_v3_opensource"),
    "olmo3": partial(_python_lines, end="</function_calls>"),
    "xlam": partial(in_list, end=""),
    "hunyuan": partial(in_list, end="</tool_calls>"),
    "nemotron": partial(in_list, end="</TOOLCALL>"),
    "gigachat3": _gigachat3,
    "gemma4": _gemma4,
    "qwen3_coder": _Tags("qwen3_coder"),
    "mimo": _Tags("mimo"),
    "seed_oss": _Tags("seed_oss"),
    "glm45": _Tags("glm45"),
    "minimax_m2": _Tags("minimax_m2"),
    "mistral": _mistral,
    "deepseek_v3": _Sections("deepseek_v3", _deepseek_v3, tail=literal("\n```"), between="\n"),
    "deepseek_v31": _Sections("deepseek_v31", _deepseek_v31),
    "kimi_k2": _Sections("kimi_k2", _kimi_k2),
    "lfm2": partial(_python, end="<|tool_call_end|>"),
    "pythonic": _python,
    "llama3_json": _llama3_json,
    "glm4": _glm4,
}
