"""A Lark grammar of texts, as rules for what JSON writes of these texts between quotes.

What JSON must escape (quotes, backslashes, control characters) is read in its shortest escape, as models write it. A
terminal that may hold such a character becomes a rule: llguidance ends a terminal at its last byte and never goes back.
A backslash must therefore be in the same terminal as the character behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final
from unicodedata import category

from forebay.base.errors import InvalidRequest

_parser: Any = vars(re)["_parser"]  # makes the syntax tree of a regular expression

_TOKENS: Final = re.compile(
    r'(?P<comment>//[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*")(?P<flag>i?)'
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[imslux]*)|(?P<other>[^\"/]+|.)",
    re.DOTALL,
)
_IMPORT: Final = re.compile(r"^[ \t]*%import\s+common\.(\w+)(?:\s*->\s*(\w+))?[ \t]*$", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"^[ \t]*%(\w+)", re.MULTILINE)
_TERMINAL: Final = re.compile(r"\b_*[A-Z][A-Z0-9_]*\b(\.\d+(?=\s*:))?")
_DECIMAL: Final = r"[0-9]+\.[0-9]*|\.[0-9]+"
_FLOAT: Final = rf"({_DECIMAL})([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
# The terminals of lark's own library as llguidance defines them. A C_COMMENT would end at its first end.
_COMMON: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "_EXP": r"[eE][+-]?[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"[+-]?({_FLOAT})",
    "NUMBER": rf"[0-9]+|{_FLOAT}",
    "SIGNED_NUMBER": rf"[+-]?([0-9]+|{_FLOAT})",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_SHORT: Final = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_ESCAPED: Final = {**{chr(code): f"\\u{code:04x}" for code in range(0x20)}, "\x7f": "\\u007f", **_SHORT}
_LAST: Final = 0x10FFFF
Ranges = list[tuple[int, int]]


def quoted(definition: str, field: str = "") -> str:
    """Raises InvalidRequest that names the `field` for notation that cannot be rewritten."""
    try:
        return _rewritten(definition)
    except InvalidRequest as error:
        error.param = field
        raise


def _rewritten(definition: str) -> str:
    definition = _IMPORT.sub(_imported, definition)
    if found := _DIRECTIVE.search(definition):
        raise _cannot(f"%{found[1]} is not supported in the grammar of a tool: only %import common.NAME is")
    return "".join(_token(found) for found in _TOKENS.finditer(definition))


def quoted_regex(pattern: str, flags: str = "") -> str:
    """The expression, for a rule, of the JSON of the texts that `pattern` is of."""
    number = 0
    for flag in flags:
        if flag not in "ims":
            raise _cannot(f"the flag {flag} of a regular expression is not supported in the grammar of a tool")
        number |= {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}[flag]
    try:
        return _sequence(_parser.parse(pattern, number), number)
    except (re.error, RecursionError, OverflowError) as error:
        raise _cannot(f"the regular expression {pattern[:100]!a} cannot be read: {error}") from error


def _cannot(what: str) -> InvalidRequest:
    return InvalidRequest(what, code="grammar_invalid", param="tools")


def _imported(found: re.Match[str]) -> str:
    name, alias = found[1], found[2] or found[1]
    if name not in _COMMON:
        raise _cannot(f"common.{name} is not supported in the grammar of a tool: write it as a terminal")
    return f"{alias}: /{_COMMON[name]}/"


def _token(found: re.Match[str]) -> str:
    if text := found["string"]:
        letters = _unescaped(text)
        flags = re.IGNORECASE if found["flag"] else 0
        return (
            f"({' '.join(_class(_cased([(ord(letter),) * 2], flags)) for letter in letters)})"
            if flags
            else _text(letters)
        )
    if text := found["regex"]:
        return f"({quoted_regex(text[1:-1].replace(chr(92) + '/', '/'), found['flags'])})"
    if found["comment"]:
        return ""
    return _TERMINAL.sub(lambda name: f"t_{name[0].partition('.')[0].lower()}", found[0])


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise _cannot(f"the text {text[:100]!a} of a grammar cannot be read: {error}") from error


def _text(letters: str) -> str:
    """The JSON of a text, as one terminal."""
    return json.dumps("".join(_ESCAPED.get(letter, letter) for letter in letters), ensure_ascii=False)


# -- regular expressions -----------------------------------------------------------------------------------------------


def _sequence(tree: Any, flags: int) -> str:
    return " ".join(filter(None, (_node(str(kind), value, flags) for kind, value in tree))) or '""'


def _node(kind: str, value: Any, flags: int) -> str:
    match kind:
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
            return _class(_characters(kind, value, flags))
        case "BRANCH":
            return f"({' | '.join(_sequence(branch, flags) for branch in value[1])})"
        case "SUBPATTERN":
            _, added, removed, inside = value
            return f"({_sequence(inside, (flags | added) & ~removed)})"
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            low, high, inside = value
            most = "" if high is _parser.MAXREPEAT else high
            return f"({_sequence(inside, flags)}){{{low},{most}}}"
        case "AT":  # a terminal is matched as a whole: its anchors say nothing
            if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
                return ""
    raise _cannot(f"a regular expression has {kind.lower()}, which is not supported in the grammar of a tool")


def _characters(kind: str, value: Any, flags: int) -> Ranges:
    match kind:
        case "LITERAL":
            return _cased([(value, value)], flags)
        case "NOT_LITERAL":
            return _inverted(_cased([(value, value)], flags))
        case "ANY":
            return [(0, _LAST)] if flags & re.DOTALL else _inverted([(0x0A, 0x0A)])
        case _:
            return _members(value, flags)


def _members(members: Any, flags: int) -> Ranges:
    found: Ranges = []
    inverts = False
    for kind, value in members:
        match str(kind):
            case "NEGATE":
                inverts = True
            case "LITERAL":
                found.append((value, value))
            case "RANGE":
                found.append(value)
            case "CATEGORY":
                name = str(value)
                ranges = _category(name.replace("NOT_", ""))
                found += _inverted(ranges) if "NOT_" in name else ranges
    found = _cased(found, flags)
    return _inverted(found) if inverts else found


def _is_space(letter: str) -> bool:
    return letter.isspace() and not "\x1c" <= letter <= "\x1f"


def _is_word(letter: str) -> bool:
    return letter.isalnum() or category(letter)[0] == "M" or letter == "_"


@cache
def _category(name: str) -> Ranges:
    """Return a Unicode category as llguidance's regular expressions write it."""
    belongs = {"CATEGORY_DIGIT": str.isdecimal, "CATEGORY_SPACE": _is_space}.get(name, _is_word)
    codes = [code for code in range(_LAST + 1) if belongs(chr(code))]
    begins = [code for code, before in zip(codes, [-2, *codes], strict=False) if code != before + 1]
    ends = [code for code, behind in zip(codes, [*codes[1:], _LAST + 2], strict=True) if code + 1 != behind]
    return list(zip(begins, ends, strict=True))


def _cased(ranges: Ranges, flags: int) -> Ranges:
    if not flags & re.IGNORECASE:
        return ranges
    letters = (chr(code) for low, high in ranges for code in range(low, min(high, 0x7F) + 1))
    both = {ord(cased) for letter in letters if letter.isalpha() for cased in (letter.lower(), letter.upper())}
    return [*ranges, *((code, code) for code in both)]


def _inverted(ranges: Ranges) -> Ranges:
    found, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _class(ranges: Ranges) -> str:
    """One character: one that JSON writes as it is, or the escape of another."""
    escapes = [escape for letter, escape in _ESCAPED.items() if any(low <= ord(letter) <= high for low, high in ranges)]
    plain = "".join(_range(low, high) for low, high in _plain(ranges))
    each = [*([f"/[{plain}]/"] if plain else []), *_alternatives(escapes)]
    if not each:
        raise _cannot("a regular expression has a class without characters")
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def _alternatives(escapes: list[str]) -> list[str]:
    """One terminal for all of them."""
    return [f"/({'|'.join(map(re.escape, escapes))})/"] if escapes else []


def _plain(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The ranges without what JSON escapes, and without surrogates."""
    outside = _inverted([*((ord(letter), ord(letter)) for letter in _ESCAPED), (0xD800, 0xDFFF)])
    for low, high in ranges:
        for first, last in outside:
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"
