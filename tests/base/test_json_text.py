"""JSON of others: no parser goes deeper than is allowed, and none is stopped by the interpreter."""

from __future__ import annotations

import pytest

from forebay.base.json_text import MAX_DEPTH, decode

DEEP = MAX_DEPTH + 1


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_text_is_read_to_the_limit_of_depth_and_no_deeper(begin: str, end: str) -> None:
    levels = begin.count("[") + begin.count("{")
    decode(begin * (MAX_DEPTH // levels) + "1" + end * (MAX_DEPTH // levels))
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH} levels"):
        decode(begin * DEEP + "1" + end * DEEP)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_text_without_end_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="nested deeper"):
        decode(text)


def test_brackets_within_strings_are_no_levels() -> None:
    text = '["' + "[{" * 1000 + '", "\\"' + "[" * 1000 + '\\\\"]'
    assert decode(text) == ["[{" * 1000, '"' + "[" * 1000 + "\\"]


@pytest.mark.parametrize("text", ["", "[1", "\ud800", "nan", "[1]]"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)
