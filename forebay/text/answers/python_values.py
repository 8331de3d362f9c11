"""Python's literals as JSON, as they come: what models that call tools in Python write as arguments."""

from __future__ import annotations

import json
import re
from typing import Final

from forebay.text.answers.cursor import Cursor, Reading, Sink, drop

_WORD: Final = re.compile(r"[\w+\-.]+")
_SPACE: Final = re.compile(r"\s+")
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_PADDED: Final = re.compile(r"-?0\d{1,15}")  # a number to JSON and to models, though not to Python
_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_NAMES: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS: Final = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES: Final = {"x": 2, "u": 4, "U": 8}  # digits behind each


def quoted(text: str) -> str:
    """Return the text as a JSON string, with non-ASCII characters unescaped."""
    return json.dumps(text, ensure_ascii=False)


def _may_follow(char: str, depth: int) -> bool:
    """Return whether a literal, or a part of one within `depth` brackets, may go on with a character."""
    if not char or (char in "]}),:" and not depth):
        return False
    return char in "\"',:()[]{}" or _WORD.match(char) is not None


def python_value(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """Copy one literal up to the comma or bracket behind it. Return False if there is no literal."""
    depth, comma = 0, False
    while True:
        yield from cursor.run(_SPACE, drop)
        char = yield from cursor.peek()
        if not _may_follow(char, depth):
            return False
        if comma and char not in "]})":  # one behind the last item says nothing, and JSON has none
            sink(",")
        comma = char == ","
        if char in "\"'":
            if not (yield from _string(cursor, sink)):
                return False
        elif char in _BRACKETS:
            depth += 1 if char in "[({" else -1
            sink(_BRACKETS[cursor.take(1)])
        elif char in ",:":
            cursor.take(1)
            if char == ":":
                sink(":")
        else:
            word: list[str] = []
            yield from cursor.run(_WORD, word.append)
            sink(atom("".join(word)))
        if not depth:
            return True


def atom(word: str) -> str:
    """Return the JSON of a word without quotes: a string if it is neither a number nor a constant."""
    if word in _NAMES:
        return _NAMES[word]
    if _PADDED.fullmatch(word):
        return str(int(word))
    return word if _NUMBER.fullmatch(word) else quoted(word)


def _string(cursor: Cursor, sink: Sink) -> Reading[bool]:
    quote = cursor.take(1)
    sink('"')
    while True:
        yield from cursor.run(_PLAIN[quote], lambda text: sink(quoted(text)[1:-1]))
        if (yield from cursor.peek()) == quote:
            cursor.take(1)
            sink('"')
            return True
        escape = yield from cursor.peek(2)
        if len(escape) < 2:
            return False
        sink(quoted((yield from _escaped(cursor, escape[1])))[1:-1])


def _escaped(cursor: Cursor, kind: str) -> Reading[str]:
    digits = yield from cursor.peek(2 + _CODES.get(kind, 0))
    if kind in _CODES and re.fullmatch(r"[0-9a-fA-F]+", digits[2:]):
        code = int(digits[2:], 16)
        if code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
            cursor.take(len(digits))
            return chr(code)
    cursor.take(2)
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    return kind if kind in "\\'\"" else f"\\{kind}"
