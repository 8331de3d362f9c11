"""From what a request asks for to a matcher, within limits: of size and depth here, of work in llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from forebay.base import json_text
from forebay.base.errors import InvalidRequest
from forebay.grammar.one_of import one_of_as_any_of
from forebay.grammar.schema_words import in_known_words
from forebay.requests.sampling_params import Grammar, GrammarKind

MAX_BYTES: Final = 64 << 10
MAX_ANSWER_BYTES: Final = 512 << 10  # of all the tools of a request
MAX_CHOICES: Final = 1024
MAX_ERROR_CHARS: Final = 500
_JSON_KINDS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.STRUCTURAL)
REWINDING: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.REGEX, GrammarKind.CHOICE)
"""Kinds of which matchers take tokens back: not those that can name tokens by their ids, or count them."""
_ANY_OBJECT: Final = '{"type": "object"}'
# Without an end models of all sizes go on with white space for ever.
_BOUNDED: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


@dataclass(frozen=True, slots=True)
class Work:
    """Limits of llguidance's work for one output. A lexer state takes 1 to 2 KB; a row has the parser items of a
    place."""

    row_items: int
    step_items: int
    step_fuel: int
    lexer_states: int

    def times(self, factor: int) -> Work:
        """Multiply all limits by `factor`."""
        return Work(*(factor * limit for limit in astuple(self)))

    def limits(self) -> LLParserLimits:
        """Errors do not quote the grammar."""
        return LLParserLimits(
            max_items_in_row=self.row_items,
            step_max_items=self.step_items,
            step_lexer_fuel=self.step_fuel,
            max_lexer_states=self.lexer_states,
            max_grammar_size=100_000,
            verbose_errors=False,
        )


CHECKED: Final = Work(2_000, 50_000, 200_000, 12_500)
"""Under these limits a grammar is tried before it is accepted."""
GROWING: Final = Work(500, 50_000, 200_000, 12_500)
"""Under these a grammar that a client wrote itself is tried for longer: its rows may grow with the output."""
ENGINE: Final = CHECKED.times(8)
"""Under these an accepted grammar is matched: no output needs eight times what its dry run needed."""


def compiled(grammar: Grammar, tokenizer: LLTokenizer, work: Work = ENGINE) -> LLMatcher:
    """Return a matcher at the beginning of its output, of which copies are cheap. Releases the interpreter's lock.
    Raises InvalidRequest with the place."""
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=work.limits())
    if matcher.is_error():
        raise refused(grammar, _explained(grammar, matcher.get_error()))
    matcher.compute_bitmask()  # the lexer's tables, which copies share, are made for the first mask
    if matcher.is_error():
        raise refused(grammar, matcher.get_error())
    return matcher


def _explained(grammar: Grammar, error: str) -> str:
    """Return the branches that overlap for an error about `oneOf`, of which llguidance names none."""
    if "oneOf" not in error or grammar.kind is not GrammarKind.JSON_SCHEMA:
        return error
    return one_of_as_any_of(in_known_words(_json(grammar)))[1] or error


def why_broken(matcher: LLMatcher) -> str:
    """Return the reason in a line; "" if it is not broken."""
    return (matcher.get_error().strip().partition("\n")[0] or "unknown") if matcher.is_error() else ""


def check_size(grammar: Grammar) -> None:
    """Raises InvalidRequest."""
    num_bytes, most = len(grammar.text), MAX_ANSWER_BYTES if grammar.kind is GrammarKind.ANSWER else MAX_BYTES
    if num_bytes <= most:
        try:
            num_bytes = len(grammar.text.encode())
        except UnicodeEncodeError as error:
            raise refused(grammar, "it has a lone surrogate: that is not valid Unicode text") from error
    if num_bytes > most:
        raise refused(grammar, f"it has {num_bytes} bytes; at most {most} are allowed")


def refused(grammar: Grammar, why: str) -> InvalidRequest:
    """Return the error for a grammar that does not compile or exceeds a limit; `why` is cut to `MAX_ERROR_CHARS`."""
    why = why.strip()
    why = why if len(why) <= MAX_ERROR_CHARS else f"{why[:MAX_ERROR_CHARS]} [..]"
    return InvalidRequest(f"the {grammar.kind} cannot be used: {why}", code="grammar_invalid", param="grammar")


def source_of(grammar: Grammar) -> str:
    """In llguidance's own notation. Raises InvalidRequest for a grammar that is too large or does not match its
    kind."""
    check_size(grammar)
    value = _json(grammar) if grammar.kind in _JSON_KINDS else None
    try:
        return _translated(grammar, value)
    except (ValueError, AssertionError, KeyError, TypeError, GbnfToLarkError) as error:
        raise refused(grammar, str(error) or "it is malformed") from error


def compilable(schema: Any) -> Any:
    """Return a schema of the same values in words that llguidance compiles, as far as there are such."""
    return one_of_as_any_of(in_known_words(schema))[0]


def json_options(schema: Any) -> Any:
    """`x-guidance` of a JSON schema, what it says itself among it."""
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    own = own if isinstance(own, dict) else {}
    return own if "whitespace_flexible" in own else {**_BOUNDED, **own}


def _translated(grammar: Grammar, value: Any) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = json.dumps(compilable(value), ensure_ascii=False)
            return str(LLMatcher.grammar_from_json_schema(text, overrides=json_options(value)))
        case GrammarKind.JSON_OBJECT:
            return str(LLMatcher.grammar_from_json_schema(_ANY_OBJECT, json_options(None)))
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice(value)))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))
        case GrammarKind.STRUCTURAL:
            return StructTag.to_grammar(list(_tags(value)), assume_special=False)
        case GrammarKind.ANSWER:
            return grammar.text


def _choice(texts: Any) -> str:
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)):
        raise ValueError("a choice is a list of strings that are not empty")
    if len(texts) > MAX_CHOICES:
        raise ValueError(f"a choice has {len(texts)} texts; at most {MAX_CHOICES} are allowed")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _tags(value: Any) -> Iterable[StructTag]:
    """Compile `{"structures": [{"begin", "schema", "end"}], "triggers": [..]}`."""
    triggers = value["triggers"]
    for structure in value["structures"]:
        begin = structure["begin"]
        found = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if found is None:
            raise ValueError(f"no trigger is what {begin!r} begins with")
        yield StructTag(trigger=found, begin=begin, grammar=compilable(structure["schema"]), end=structure["end"])


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(json_text.checked(grammar.text))
    except ValueError as error:
        raise refused(grammar, f"it is no JSON: {error}") from error
