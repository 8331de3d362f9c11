"""Rules of calls in the form that a checkpoint declares: what `text.answers.declared` reads is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from forebay.grammar.lark import CallRule, Lark, as_pattern, cannot, literal
from forebay.grammar.spelled_calls import Member, Spelled, arguments_of, in_order, keywords, objects, tagged_value
from forebay.text.answers.argument_types import ArgumentType, types_of
from forebay.text.answers.declared.declaration import (
    CallShape,
    Captured,
    Json,
    Lines,
    Python,
    Region,
    Source,
    Tags,
    Within,
)
from forebay.text.answers.declared.patterns import Pattern
from forebay.text.answers.declared.trees import (
    Assertion,
    Chain,
    Char,
    Choice,
    Group,
    Node,
    Repeat,
    beginnings,
    literal_text,
)

_FIELD: Final = "tool_choice"
_KEY: Final = r"/[^<>\"\n:= ]+/"  # of a line
_MOST: Final = 64  # repetitions that are written of those without a limit
_SPACE: Final = r"\s"
_ANYTHING: Final = r"[\s\S]"
_WHOLE: Final = Within(())


@dataclass(frozen=True)
class DeclaredCalls:
    """Spells the calls of a region, behind the first marker of it."""

    region: Region
    opens: Pattern
    shape: CallShape

    def __call__(self, lark: Lark, calls: Sequence[CallRule], one: bool) -> Spelled:
        region, shape = self.region, self.shape
        _, behind = beginnings(self.opens.tree)
        if shape.each:
            content = f'"[" {lark.some(self._listed(lark, calls, shape), ", ", one)} "]"'
            return Spelled(f"{written(lark, behind, {})} SPACE? {content} SPACE? {_closed(lark, region.closes, {})}")
        fitting = [call for call in calls if not isinstance(shape.name, str) or shape.name == call.name]
        each = [self._call(lark, call, shape, behind) for call in fitting]
        if not each:
            raise cannot("the declared calls name a tool that may not be called", _FIELD)
        return Spelled(f"{lark.one_of(each)} SPACE?", "")

    def _call(self, lark: Lark, call: CallRule, shape: CallShape, behind: Node) -> str:
        named = {shape.name.group: call.name} if isinstance(shape.name, Captured) else {}
        content = self._content(lark, call, shape)
        return f"{written(lark, behind, named)} SPACE? {content} {_closed(lark, self.region.closes, named)}"

    def _listed(self, lark: Lark, calls: Sequence[CallRule], shape: CallShape) -> str:
        if isinstance(self.region.content, Python):
            return lark.one_of([f'{literal(f"{call.name}(")} {keywords(lark, call)} ")"' for call in calls])
        name, arguments = _key(shape.name), _key(shape.arguments)
        return objects(lark, calls, arguments, name)

    def _content(self, lark: Lark, call: CallRule, shape: CallShape) -> str:
        content = self.region.content
        if isinstance(shape.name, Within):
            if not isinstance(content, Json) or content.delims:
                raise _unwritten("the name of a call")
            return _object(lark, call, shape)
        if shape.arguments != _WHOLE:
            raise _unwritten("arguments that the transform puts together")
        match content:
            case Json(delims=delims) if delims and call.enforced:
                members = in_order(lark, call, ",", partial(_relaxed_member, content))
                return f'"{{" {members} "}}" SPACE?'
            case Tags():
                return _tags(lark, call, content, _ends(lark, self.region))
            case Lines():
                return _lines(lark, call, content, _ends(lark, self.region))
        return f"{lark.arguments(call)} SPACE?"


def _unwritten(what: str) -> Exception:
    return cannot(f"the checkpoint's response_template has {what} in a form that cannot be enforced", _FIELD)


def _key(source: Source | None) -> str:
    if not isinstance(source, Within) or len(source.keys) != 1:
        raise _unwritten("the name or the arguments of a call")
    return source.keys[0]


def _object(lark: Lark, call: CallRule, shape: CallShape) -> str:
    """Return an expression of a JSON object with name and arguments where the shape has them."""
    name, arguments = shape.name, shape.arguments
    if not isinstance(name, Within) or not isinstance(arguments, Within) or name.keys[:-1] != arguments.keys[:-1]:
        raise _unwritten("the name or the arguments of a call")
    outer = name.keys[:-1]
    begin, end = literal("".join(f"{{{literal(key)}: " for key in outer)), literal("}" * len(outer))
    return f"{begin} {objects(lark, [call], arguments.keys[-1], name.keys[-1])} {end} SPACE?"


def _closed(lark: Lark, closes: Pattern | None, named: Mapping[str, str]) -> str:
    return written(lark, closes.tree, named) if closes is not None else ""


def _ends(lark: Lark, region: Region) -> str:
    """Return a pattern of what ends the region within a text."""
    return lark.as_text(*(beginnings(region.closes.tree)[0] if region.closes is not None else ()))


def framed(lark: Lark, region: Region | None, content: str) -> str:
    """Return an expression of a text in its region; the implicit one has no frame."""
    if region is None or region.opens is None:
        return content
    closes = _closed(lark, region.closes, {})
    return f"{written(lark, region.opens.tree, {})} {content} {f'({closes})?' if closes else ''}"


def _tags(lark: Lark, call: CallRule, tags: Tags, ends: str) -> str:
    close = literal_text(tags.closes.tree)
    if close is None or isinstance(tags.closes.tree, Choice):
        raise _unwritten("tags")

    def pair(key: str | None, value: str) -> str:
        opens = written(lark, tags.opens.tree, {} if key is None else {"key": key})
        return lark.rule(f"{opens} {value} SPACE?")

    any_text = partial(lark.until, close, without=ends)
    if not call.enforced:
        return f"({pair(None, any_text())})*"
    made = []
    for member in arguments_of(call):
        value = tagged_value(lark, call, _as_read(call, member, tags), lark.marker(close), any_text)
        made.append(f"{pair(member.key, value)}{'?' if member.optional else ''}")
    return " ".join(made)


def _as_read(call: CallRule, member: Member, pairs: Tags | Lines) -> Member:
    """Return the argument as its value is read: a text if its schema names no type. Raises InvalidRequest for one that
    may be a text or another value, whose quotes would be read as part of the text."""
    types = types_of(call.parameters, member.key)
    if not types:
        return member._replace(kind=ArgumentType(text=True))
    if member.kind.text or "string" not in types or isinstance(pairs.value, Json):
        return member
    raise cannot(f"{member.key} takes texts and other values, which look alike in the declared form", call.field)


def _lines(lark: Lark, call: CallRule, lines: Lines, ends: str) -> str:
    if not call.enforced:
        any_line = lark.until(lines.between, without=ends)
        return f"({_KEY} {literal(lines.separator)} {any_line})*"
    made = []
    for member in arguments_of(call):
        if types_of(call.parameters, member.key) & {"object", "array"}:
            raise cannot(f"{member.key} may have more than one line, and the declared form has one each", call.field)
        any_text = partial(lark.until, lines.between, without=ends)
        value = tagged_value(lark, call, _as_read(call, member, lines), literal(lines.between), any_text)
        rule = lark.rule(f"{literal(f'{member.key}{lines.separator} ')} {value}")
        made.append(f"{rule}{'?' if member.optional else ''}")
    return " ".join(made)


def _relaxed_member(content: Json, lark: Lark, call: CallRule, member: Member) -> str:
    """Write a text between the model's own marks if nothing limits it, and JSON otherwise."""
    key = literal(f"{member.key}:" if content.unquoted_keys and member.key.isidentifier() else f'"{member.key}":')
    if member.text:
        return f"{key} {lark.quoted(member.text, call.field)}"
    if not member.kind.text or member.kind.nullable or member.limit or member.texts is not None:
        return f"{key} {lark.json(member.schema)}"
    return f"{key} {lark.marker(content.delims[0][0])} {lark.until(content.delims[0][1])}"


def written(lark: Lark, node: Node, named: Mapping[str, str]) -> str:
    """Return an expression of texts that a pattern matches; `named` are those of groups."""
    text = literal_text(node) if not isinstance(node, Choice) else None
    if text is not None:
        return lark.marker(text)
    match node:
        case Char(source, _):
            return f"/{_as_class(source)}/"
        case Chain(parts):
            return _chain(lark, parts, named)
        case Choice(options):
            return f"({' | '.join(written(lark, option, named) or chr(34) * 2 for option in options)})"
        case Group(part, name):
            return _named(named[name], part) if name in named else written(lark, part, named)
        case Repeat():
            return _repeat(lark, node, named)
        case Assertion():
            return ""
    raise _unwritten("a condition")


def _named(text: str, part: Node) -> str:
    if not Pattern(part).whole(text):
        raise _unwritten(f"names, of which {text!r} is none,")
    return literal(text)


def _chain(lark: Lark, parts: Sequence[Node], named: Mapping[str, str]) -> str:
    """Write neighbouring characters as one text: tokens are found in it."""
    found: list[str] = []
    run = ""
    for part in parts:
        if isinstance(part, Char) and part.literal:
            run += part.literal
            continue
        found += [lark.marker(run)] if run else []
        run = ""
        found.append(written(lark, part, named))
    return " ".join(filter(None, [*found, *([lark.marker(run)] if run else [])]))


def _repeat(lark: Lark, node: Repeat, named: Mapping[str, str]) -> str:
    part = node.part
    if isinstance(part, Char) and part.source == _SPACE:
        return "SPACE" if node.least else "SPACE?"
    if node.least == 0 and isinstance(part, Char) and part.source == _ANYTHING:
        return ""  # what the pattern skips
    most = node.least + _MOST if node.most is None else node.most
    if isinstance(part, Char):
        return f"/({_as_class(part.source)}){{{node.least},{most}}}/"
    return f"({written(lark, part, named)}){{{node.least},{most}}}"


def _as_class(source: str) -> str:
    return source.replace("/", r"\/").replace("\n", r"\n") if len(source) > 1 else as_pattern(source)
