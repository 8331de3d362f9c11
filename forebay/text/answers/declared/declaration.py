"""A checkpoint's `response_template`: the fields of an answer, and the patterns that each begins and ends with.

The language is that of transformers, version 1, as its page on response parsing describes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.text.answers.declared.patterns import Pattern
from forebay.text.answers.declared.trees import (
    Chain,
    Group,
    Node,
    PatternError,
    group_names,
    least_chars,
    literals,
    parsed,
    runs,
    without_space,
)

THINKING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning", "thought", "tool_plan")
CONTENT_FIELD: Final = "content"
CALLS_FIELD: Final = "tool_calls"
_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS: Final = frozenset(
    {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
     "transform", "transform_each"}
)  # fmt: skip
_MAX_FIELDS: Final = 16
_MAX_WORDS: Final = 64  # of one list of literals
_MAX_WORD_CHARS: Final = 256
_MAX_DEPTH: Final = 8
_PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_JSON_ARGS: Final = {"unquoted_keys", "string_delims", "allow_non_json"}
_TAG_ARGS: Final = {"tag_pattern", "value_parser", "merge_duplicates"}
_LINE_ARGS: Final = {"line_sep", "kv_sep", "strip", "value_parser"}


class DeclarationError(ValueError):
    """The declaration is malformed, or what it declares is not supported."""


# -- what is between the patterns --------------------------------------------------------------------------------------


class Scalar(NamedTuple):
    """A text, or a value made of it: `kind` is `text`, `int`, `float`, `bool`, or `raw` for a text with the white space
    around it."""

    kind: str


class Json(NamedTuple):
    """JSON; also with keys without quotes, and with texts between marks (`delims`). With `lax`, what is no JSON is a
    text."""

    unquoted_keys: bool = False
    delims: tuple[tuple[str, str], ...] = ()
    lax: bool = False

    @property
    def plain(self) -> bool:
        return not (self.unquoted_keys or self.delims or self.lax)


class Tags(NamedTuple):
    """Pairs, each a tag with a group `key`, a value up to another tag. With `merges` the values of one key are a list,
    with `trims` white space at the end of a value is of the tag behind it."""

    opens: Pattern
    closes: Pattern
    value: Content
    merges: bool
    trims: bool


class Lines(NamedTuple):
    """Pairs, a line each."""

    between: str
    separator: str
    strips: bool
    value: Content


class Python(NamedTuple):
    """`[name(key=value), ...]`."""


Content: TypeAlias = Scalar | Json | Tags | Lines | Python


# -- what is made of it ------------------------------------------------------------------------------------------------


class Captured(NamedTuple):
    """The text of a group of the pattern that opens the region, or of the one that closes it (`late`)."""

    group: str
    late: bool


class Within(NamedTuple):
    """Part of the content, under these keys."""

    keys: tuple[str, ...]


class Made(NamedTuple):
    """An object or list, whose members are such sources or constants."""

    tree: Any


Source: TypeAlias = str | Captured | Within | Made


class CallShape(NamedTuple):
    """Where the name and the arguments of a call are; with `each`, the content is a list of calls."""

    name: Source
    arguments: Source | None
    each: bool = False


@dataclass(frozen=True)
class Region:
    """A part of an answer: from a match of `opens` to one of `closes`, or to the end. The implicit region has no
    `opens`, and has the text that belongs to no other."""

    name: str
    opens: Pattern | None
    closes: Pattern | None
    content: Content
    join: str
    shape: CallShape | None = None

    @property
    def thinks(self) -> bool:
        return self.name in THINKING_FIELDS

    @property
    def calls(self) -> bool:
        return self.name == CALLS_FIELD

    @property
    def says(self) -> bool:
        return self.name == CONTENT_FIELD

    @property
    def dropped(self) -> bool:
        """Return whether no part of an answer has its text."""
        return not (self.thinks or self.calls or self.says)


@dataclass(frozen=True)
class Declaration:
    """The regions of an answer. `anchor` is what the answer begins behind, the last time that it is in the prompt.
    `spellings` are the added tokens that are part of a pattern."""

    regions: tuple[Region, ...]
    anchor: Pattern
    spellings: frozenset[str] = frozenset()

    def _first(self, wanted: Callable[[Region], bool]) -> Region | None:
        return next(filter(wanted, self.regions), None)

    @cached_property
    def calls(self) -> Region | None:
        return self._first(lambda region: region.calls)

    @cached_property
    def thinking(self) -> Region | None:
        return self._first(lambda region: region.thinks)

    @cached_property
    def content(self) -> Region | None:
        return self._first(lambda region: region.says)

    @cached_property
    def implicit(self) -> Region | None:
        return self._first(lambda region: region.opens is None)


def declaration_of(spec: Any, added: Collection[str] = ()) -> Declaration:
    """Read a `response_template`; `added` are the spellings of added tokens. Raises DeclarationError."""
    fields = _checked(spec)
    try:
        anchor = _bound(spec, "start_anchor", "it")
        regions = tuple(_region(str(name), field) for name, field in fields.items())
    except PatternError as error:
        raise DeclarationError(str(error)) from None
    if anchor is None:
        raise DeclarationError("neither start_anchor nor start_anchor_pattern is there")
    if len(unopened := [region.name for region in regions if region.opens is None]) > 1:
        raise DeclarationError(f"fields without open: {', '.join(unopened)}; one may be")
    texts = [text for region in regions for text in _texts(region)]
    return Declaration(regions, anchor, frozenset(word for word in added if any(word in text for text in texts)))


def _checked(spec: Any) -> dict[str, Any]:
    """Return the fields of a declaration whose outline is right."""
    if not isinstance(spec, dict):
        raise DeclarationError(f"it is {type(spec).__name__}, not an object")
    _check_keys(spec, _KEYS, "it")
    if spec.get("version", 1) != 1 or not isinstance(spec.get("defaults", {}), dict):
        raise DeclarationError("version must be 1, and defaults an object")
    fields = spec.get("fields")
    if not isinstance(fields, dict) or not 1 <= len(fields) <= _MAX_FIELDS:
        raise DeclarationError(f"fields must be an object of 1 to {_MAX_FIELDS}")
    return fields


def _texts(region: Region) -> Iterator[str]:
    """Yield what is written the same in each such region."""
    for bound in (region.opens, region.closes):
        yield from runs(bound.tree) if bound is not None else ()
    yield from _inner_texts(region.content)


def _inner_texts(content: Content) -> Iterator[str]:
    match content:
        case Json():
            yield from (text for pair in content.delims for text in pair)
        case Tags():
            yield from (run for bound in (content.opens, content.closes) for run in runs(bound.tree))
            yield from _inner_texts(content.value)
        case Lines():
            yield from (content.between, content.separator)


def _check_keys(spec: Mapping[str, Any], known: Collection[str], what: str) -> None:
    if unknown := sorted(map(str, set(spec) - set(known))):
        raise DeclarationError(f"{what} has unknown keys: {', '.join(unknown)[:200]}")


def _region(name: str, field: Any) -> Region:
    what = f"field {name[:64]!r}"
    if not isinstance(field, dict):
        raise DeclarationError(f"{what} is not an object")
    _check_keys(field, _FIELD_KEYS, what)
    opens, closes = _bound(field, "open", what), _bound(field, "close", what)
    if opens is not None and least_chars(opens.tree) == 0:
        raise DeclarationError(f"{what}: open_pattern matches the empty text")
    each = _checked_flags(field, what)
    content = _content(field.get("content", "text"), field.get("content_args", {}), what, 0)
    captured = {group: Captured(group, late=False) for group in _groups(opens)}
    captured |= {group: Captured(group, late=True) for group in _groups(closes)}
    transform = field.get("transform")
    if captured and transform is None:
        raise DeclarationError(f"{what} has named groups and no transform")
    _check_placeholders(transform, what, 0)
    shape = _shape(transform, captured, content, each, what) if name == CALLS_FIELD else None
    return Region(name, opens, closes, content, field.get("join") or "", shape)


def _checked_flags(field: Mapping[str, Any], what: str) -> bool:
    """Return `transform_each`, if it and `join` fit to what else the field has."""
    join = field.get("join")
    if join is not None and not (isinstance(join, str) and field.get("repeats")):
        raise DeclarationError(f"{what}: join must be a text, and needs repeats")
    each = field.get("transform_each", False)
    if not isinstance(each, bool) or (each and field.get("transform") is None):
        raise DeclarationError(f"{what}: transform_each must be true or false, and needs a transform")
    return each


def _groups(bound: Pattern | None) -> tuple[str, ...]:
    return tuple(group_names(bound.tree)) if bound is not None else ()


def _bound(field: Mapping[str, Any], key: str, what: str) -> Pattern | None:
    """Return the pattern that a field has as texts (`open`) or as a pattern (`open_pattern`); None if it has none."""
    pattern_key = f"{key}_pattern"
    if key in field and pattern_key in field:
        raise DeclarationError(f"{what} has both {key} and {pattern_key}")
    if pattern_key in field:
        return _pattern(field[pattern_key], pattern_key, what)
    return _words(field[key], key, what) if key in field else None


def _pattern(source: Any, key: str, what: str) -> Pattern:
    if not isinstance(source, str):
        raise DeclarationError(f"{what}: {key} is not a text")
    tree = parsed(source)
    if len(names := list(group_names(tree))) != len(set(names)):
        raise DeclarationError(f"{what}: {key} names a group twice")
    return Pattern(without_space(tree))  # white space around a region is of no part of the answer


def _words(found: Any, key: str, what: str) -> Pattern:
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list) or not 1 <= len(words) <= _MAX_WORDS:
        raise DeclarationError(f"{what}: {key} must be a text or a list of 1 to {_MAX_WORDS}")
    if not all(isinstance(word, str) and 1 <= len(word) <= _MAX_WORD_CHARS for word in words):
        raise DeclarationError(f"{what}: {key} must be texts of 1 to {_MAX_WORD_CHARS} characters")
    return Pattern(literals(list(dict.fromkeys(words))))


def _content(name: Any, args: Any, what: str, depth: int) -> Content:
    if depth > _MAX_DEPTH or not isinstance(args, dict) or not isinstance(name, str):
        raise DeclarationError(f"{what}: content must be a name, and content_args an object")
    match name:
        case "text" | "int" | "float" | "bool":
            return Scalar(name)
        case "json":
            _check_keys(args, _JSON_ARGS, f"{what}: content_args")
            return Json(bool(args.get("unquoted_keys")), _delims(args, what), bool(args.get("allow_non_json")))
        case "xml-inline":
            _check_keys(args, _TAG_ARGS, f"{what}: content_args")
            opens, closes = _tag(args.get("tag_pattern"), what)
            bare = without_space(closes)
            value, merges = _value(args, what, depth), bool(args.get("merge_duplicates"))
            return Tags(Pattern(opens), Pattern(bare), value, merges, trims=bare is not closes)
        case "kv-lines":
            _check_keys(args, _LINE_ARGS, f"{what}: content_args")
            between, separator = args.get("line_sep", "\n"), args.get("kv_sep", ":")
            for text in (between, separator):
                if not isinstance(text, str) or not 1 <= len(text) <= _MAX_WORD_CHARS:
                    raise DeclarationError(f"{what}: line_sep and kv_sep must be texts")
            return Lines(between, separator, bool(args.get("strip", True)), _value(args, what, depth))
        case "python-call-list":
            return Python()
    raise DeclarationError(f"{what}: the content {name[:64]!r} is not known")


def _value(args: Mapping[str, Any], what: str, depth: int) -> Content:
    parser = args.get("value_parser")
    if parser is None:
        return Scalar("raw")
    if not isinstance(parser, dict):
        raise DeclarationError(f"{what}: value_parser is not an object")
    value = _content(parser.get("name", "text"), parser.get("args", {}), what, depth + 1)
    if isinstance(value, Tags | Lines | Python):
        raise DeclarationError(f"{what}: pairs within pairs are not supported")
    return value


def _delims(args: Mapping[str, Any], what: str) -> tuple[tuple[str, str], ...]:
    pairs = args.get("string_delims", [])
    if not isinstance(pairs, list) or len(pairs) > _MAX_WORDS:
        raise DeclarationError(f"{what}: string_delims is not a list of pairs")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)):
            raise DeclarationError(f"{what}: string_delims is not a list of pairs")
    return tuple((opens, closes) for opens, closes in pairs)


def _tag(pattern: Any, what: str) -> tuple[Node, Node]:
    """Split the pattern of a tag at its value: what opens it, with the key, and what closes it."""
    if not isinstance(pattern, str):
        raise DeclarationError(f"{what}: tag_pattern is not a text")
    parts = _flat(parsed(pattern))
    at = {part.name: i for i, part in enumerate(parts) if isinstance(part, Group)}
    if "value" not in at or at.get("key", len(parts)) > at["value"]:
        raise DeclarationError(f"{what}: tag_pattern needs a group key and behind it a group value, in no other group")
    opens, closes = Chain(tuple(parts[: at["value"]])), Chain(tuple(parts[at["value"] + 1 :]))
    if not least_chars(opens) or not least_chars(closes):
        raise DeclarationError(f"{what}: tag_pattern must have a text on both sides of the value")
    return without_space(opens), closes


def _flat(tree: Node) -> list[Node]:
    return [part for each in tree.parts for part in _flat(each)] if isinstance(tree, Chain) else [tree]


def _check_placeholders(transform: Any, what: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise DeclarationError(f"{what}: the transform is nested more than {_MAX_DEPTH} deep")
    if isinstance(transform, dict | list):
        for each in transform.values() if isinstance(transform, dict) else transform:
            _check_placeholders(each, what, depth + 1)
    elif isinstance(transform, str) and _PLACEHOLDER.search(transform) and not _PLACEHOLDER.fullmatch(transform):
        raise DeclarationError(f"{what}: {transform[:80]!r} mixes a placeholder with a text")


def _shape(transform: Any, captured: Mapping[str, Captured], content: Content, each: bool, what: str) -> CallShape:
    """Find where a call has its name and arguments, by what its transform makes of it."""
    listed = isinstance(content, Python)
    if each and not isinstance(content, Python | Json):
        raise DeclarationError(f"{what}: transform_each needs a list")
    call = transform.get("function", transform) if isinstance(transform, dict) else transform
    if isinstance(call, dict):
        if "name" not in call:
            raise DeclarationError(f"{what}: the transform makes no call with a name")
        arguments = _source(call["arguments"], captured, each, what) if "arguments" in call else None
        return CallShape(_source(call["name"], captured, each, what), arguments, each or listed)
    whole = Within(() if listed else ("function",)) if call is None else _source(call, captured, each, what)
    if not isinstance(whole, Within):
        raise DeclarationError(f"{what}: the transform makes no call")
    return CallShape(Within((*whole.keys, "name")), Within((*whole.keys, "arguments")), each or listed)


def _source(tree: Any, captured: Mapping[str, Captured], each: bool, what: str) -> Source:
    """Return what a part of a transform stands for."""
    if isinstance(tree, dict):
        return Made({key: _source(part, captured, each, what) for key, part in tree.items()})
    if not isinstance(tree, str):
        return Made(tree)
    match = _PLACEHOLDER.fullmatch(tree)
    if match is None:
        return tree
    root, *keys = match[1].split(".")
    if not each and root == "content":
        return Within(tuple(keys))
    if root in captured:
        return captured[root]
    if each:
        return Within((root, *keys))
    raise DeclarationError(f"{what}: nothing is called {root!r} in the transform")
