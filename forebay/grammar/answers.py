"""The grammar of an answer: thinking, then the client's form, or calls as the model spells them.

Markers that are tokens of their own are named by id, so that text is never taken for one; others are read as text. The
text behind a marker is spelled as chat templates spell it, and the client's part is its JSON schema. The notation is
llguidance's: rules in small letters, terminals in capitals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forebay.grammar.compiler import source_of
from forebay.grammar.declared_calls import DeclaredCalls, framed
from forebay.grammar.lark import CallRule, Lark, cannot, last_token, literal
from forebay.grammar.spelled_calls import SPELLED, Spell, Spelled, call_in_text, in_list
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.answers.calls import objects
from forebay.text.answers.formats import CHANNELS, CallFormat, ThinkTags
from forebay.text.answers.reading import AnswerFormats
from forebay.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """Rules of an answer, behind its thinking. `calls`: of these tools, in any answer (`must_call`: in this one;
    `one_call`: and no second one; `restricted`: there are tools that may not be called). `content`: what it looks like
    where it calls nothing. `opened`: the prompt ends within the thinking, which has at most `max_thinking_tokens`."""

    calls: Sequence[CallRule] = ()
    must_call: bool = False
    restricted: bool = False
    one_call: bool = False
    content: Grammar | None = None
    opened: bool = False
    max_thinking_tokens: int | None = None

    @property
    def enforces_calls(self) -> bool:
        """Return whether not every call may be written."""
        return self.must_call or self.restricted or any(rule.enforced for rule in self.calls)

    @property
    def are_enforced(self) -> bool:
        """Whether the answer needs a grammar."""
        return self.enforces_calls or self.content is not None or self.max_thinking_tokens is not None


def answer_grammar(formats: AnswerFormats, table: TokenBytes, rules: AnswerRules) -> Grammar | None:
    """None if nothing is to be enforced. Raises InvalidRequest `grammar_invalid` for a form that cannot be enforced,
    with the client's field."""
    if not rules.are_enforced:
        return None
    parts = (formats.thinking, formats.calls == CHANNELS, formats.declared, rules.calls)
    if rules.content is not None and not any(parts):
        return rules.content
    lark = Lark(table)
    start = _channels(lark, rules) if CHANNELS in (formats.calls, formats.thinking) else _tags(lark, formats, rules)
    grammars = [{"name": "answer", "lark_grammar": "\n".join((f"start: {start}", *lark.rules))}]
    grammars += _embedded(rules.content) if "@content" in start else []
    grammars += lark.grammars
    return Grammar(GrammarKind.ANSWER, json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":")))


def can_limit_thinking(formats: AnswerFormats, table: TokenBytes) -> bool:
    """Return whether `max_thinking_tokens` can be enforced: the thinking ends with one added token."""
    if formats.thinking == CHANNELS:
        return last_token(table, "<|end|>")[1] is not None
    return formats.think_tags is not None and last_token(table, formats.think_tags.closes)[1] is not None


def _content(lark: Lark, content: Grammar) -> str:
    """In place if possible: two grammars with equal beginnings are only distinguished within one."""
    match content.kind:
        case GrammarKind.JSON_OBJECT:
            return lark.json({"type": "object"})
        case GrammarKind.JSON_SCHEMA if isinstance(schema := json.loads(content.text), dict):
            return lark.json(schema)
        case GrammarKind.CHOICE:
            return lark.rule(" | ".join(map(literal, json.loads(content.text))))
        case _:
            return "@content"


def _embedded(content: Grammar | None) -> list[dict[str, Any]]:
    """Return the embedded grammars, of which the first is called `content`."""
    if content is None:
        return []
    source = source_of(content)
    found = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return [{**found[0], "name": "content"}, *found[1:]]


def _tags(lark: Lark, formats: AnswerFormats, rules: AnswerRules) -> str:
    return f"{_thinking(lark, formats, rules)} {_behind_thinking(lark, formats, rules)}"


def _behind_thinking(lark: Lark, formats: AnswerFormats, rules: AnswerRules) -> str:
    region = formats.declared.content if formats.declared is not None else None
    form, layout = _call_format(formats, rules), _layout(lark, formats)
    around = f"({layout})*" if layout else ""
    content = ""
    if rules.content is not None:
        content = f"{around} {framed(lark, region, f'SPACE? {_content(lark, rules.content)}')} {around}"
    if form is None:
        return content or _as_they_come(lark, formats, called=False)
    calls = _Calls(lark, formats, form, rules)
    if rules.must_call:
        return f"SPACE? {around} {calls.alone()}"
    if content:
        return f"SPACE? ({content} | {around} {calls.alone()})"
    if not rules.enforces_calls:
        return _as_they_come(lark, formats, called=True)
    if region is not None and region.opens is not None:
        return f"SPACE? ({framed(lark, region, calls.no_call())} | {calls.alone()})"
    return calls.in_text(layout)


def _layout(lark: Lark, formats: AnswerFormats) -> str:
    """Return an expression of one marker around texts and calls, which is part of neither. Calls that begin with a
    name have none: text could not be told from it."""
    form, tags = formats.call_format, formats.think_tags
    marked = form.layout if form is not None and not form.named else ()
    words = dict.fromkeys((*marked, *(tags.layout if tags is not None else ())))
    return " | ".join(map(lark.marker, words))


def _call_format(formats: AnswerFormats, rules: AnswerRules) -> CallFormat | None:
    """Return the format of the calls that there may be. Raises InvalidRequest for declared ones without a marker."""
    form = formats.call_format if rules.calls else None
    if form is None and rules.calls and rules.enforces_calls:
        raise cannot("the declared calls of this model have no marker, so that they cannot be enforced", "tool_choice")
    return form


def _as_they_come(lark: Lark, formats: AnswerFormats, *, called: bool) -> str:
    """Return an expression of text with all markers that are tokens; those of calls if there may be some (`called`)."""
    tags = formats.think_tags
    layout = tags.layout if tags is not None else ()
    words = formats.spellings if called or formats.declared is not None else layout
    tokens = sorted(token for word in words if (token := lark.table.added(word)) is not None)
    return f"(TEXT <[{','.join(map(str, tokens))}]>)* TEXT" if tokens else "TEXT"


def _thinking(lark: Lark, formats: AnswerFormats, rules: AnswerRules) -> str:
    tags = formats.think_tags
    if tags is None and formats.thinking is not None:
        raise cannot("the declared thinking of this model has no marker, so that no answer can be enforced", "tools")
    if tags is None and rules.max_thinking_tokens is not None:
        raise cannot("the chat template of this model has no form of thinking", "max_thinking_tokens")
    if tags is None:
        return ""
    form = formats.call_format if rules.calls else None
    calls = lark.as_text(*form.marks) if form is not None else ""  # one in the thinking would be read, unenforced
    closed = lark.until(tags.closes, rules.max_thinking_tokens, without=calls)
    return closed if rules.opened else f"({lark.marker(tags.opens)} {_label(tags)} {closed})?"


def _label(tags: ThinkTags) -> str:
    return f"{literal(tags.label)}?" if tags.label else ""


def _spelling(formats: AnswerFormats, form: CallFormat) -> Spell:
    region = formats.declared.calls if formats.declared is not None else None
    if region is None or region.opens is None or region.shape is None:
        return SPELLED[form.name]
    return DeclaredCalls(region, region.opens, region.shape)


class _Calls:
    """Calls in a model's format, if with the marks of its chat template then behind these alone."""

    def __init__(self, lark: Lark, formats: AnswerFormats, form: CallFormat, rules: AnswerRules) -> None:
        self._lark, self._form, self._rules = lark, form, rules
        self._bare = not formats.marks[0] and form.may_be_bare
        marked = any(formats.marks) and form.body is objects
        self._spell: Spell = partial(in_list, end=formats.marks[1]) if marked else _spelling(formats, form)

    def _spelled(self) -> Spelled:
        return self._spell(self._lark, self._rules.calls, self._rules.one_call)

    def alone(self) -> str:
        """An answer of calls alone."""
        spelled = self._spelled()
        begin = "" if self._bare else self._lark.marker(self._form.begins[0])
        section = self._lark.rule(f"{begin} {spelled.section}")
        if self._rules.one_call or spelled.between is None:
            return section
        return f"{section} ({literal(spelled.between)} {section})*" if spelled.between else f"{section}+"

    def in_text(self, layout: str) -> str:
        """Return an expression of text, in which what follows a marker of calls is one, or at whose head some are.
        `layout` may be between parts."""
        lark, form = self._lark, self._form
        if form.named:
            return self._named_or_text()
        section = lark.rule(self._spelled().section)
        unmarked = call_in_text(form, [call.name for call in self._rules.calls])
        begin = form.begins[0]
        calls = "|".join(filter(None, (unmarked, lark.as_text(*form.begins))))
        text = lark.without(calls)
        apart = f"({text} ({layout}))*" if layout else ""
        called = f"({apart} {lark.until(begin, without=calls)} {section})*"
        if not self._bare:
            return f"{called} {apart} {text}"
        other = lark.other_than(form.bare, calls)
        return f"(SPACE? {section} | {lark.marker(begin)} {section} | {other})"

    def _named_or_text(self) -> str:
        """Return an expression of a call that begins with its name, or of text in which no line is such a name. White
        space before the name is of one terminal with it, since text may begin with white space as well."""
        lark, calls = self._lark, self._rules.calls
        called = lark.one_of([f"{lark.line(call.name)} {lark.arguments(call)}" for call in calls])
        return f"({called} | {lark.without_lines([call.name for call in calls], self._form.layout)})"

    def no_call(self) -> str:
        """Text without a marker of calls."""
        return self._lark.without(self._lark.as_text(*self._form.begins))


def _channels(lark: Lark, rules: AnswerRules) -> str:
    """Any thinking and words to the client before a call or the answer."""
    channel, message = lark.marker("<|channel|>"), lark.marker("<|message|>")
    behind = f'{lark.marker("<|start|>")} "assistant"'
    most = rules.max_thinking_tokens
    thought = f'{channel} "analysis" {message} {lark.until("<|end|>", most)} {behind}'
    said = f'{channel} "commentary" {message} {lark.until("<|end|>")} {behind}'
    before = f"({thought} | {said})*" if most is None else f"({thought})? ({said})*"
    content = "TEXT" if rules.content is None else _content(lark, rules.content)
    last = [] if rules.must_call else [f'"final" {message} {content}']
    for call in rules.calls:
        head = literal(f"commentary to=functions.{call.name} ")
        last.append(f'{head} {lark.marker("<|constrain|>")} "json" {message} {lark.arguments(call)}')
    return f"{before} {channel} ({' | '.join(last)})"
