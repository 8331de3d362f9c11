"""The grammar of an answer: thinking, then what the client asked for, or calls as the model spells them.

Markers that are tokens of their own are named by id, so that text is never taken for one; others are read as text. What
comes behind a marker is spelled as chat templates spell it, and the client's part is its JSON schema. The notation is
llguidance's: rules in small letters, terminals in capitals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.grammar.compiler import source_of
from forebay.grammar.spelled_calls import SPELLED, CallRule, Lark, call_in_text, cannot, literal
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.answers.formats import CALL_FORMATS, CHANNELS, THINK_TAGS, CallFormat
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


def answer_grammar(formats: AnswerFormats, table: TokenBytes, rules: AnswerRules) -> Grammar | None:
    """None where nothing is to be enforced. Raises InvalidRequest `grammar_invalid` for what cannot be, with the
    client's field."""
    calls = rules.must_call or rules.restricted or any(rule.enforced for rule in rules.calls)
    if not (calls or rules.content or rules.max_thinking_tokens is not None):
        return None
    thinks = formats.thinking is not None or formats.calls == CHANNELS
    if rules.content is not None and not (thinks or rules.calls):
        return rules.content
    lark = Lark(table)
    start = _channels(lark, rules) if CHANNELS in (formats.calls, formats.thinking) else _tags(lark, formats, rules)
    grammars = [{"name": "answer", "lark_grammar": "\n".join((f"start: {start}", *lark.rules))}]
    grammars += _embedded(rules.content) if "@content" in start else []
    grammars += lark.grammars
    return Grammar(GrammarKind.ANSWER, json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":")))


def _content(lark: Lark, content: Grammar) -> str:
    """In place where that can be: two grammars whose beginnings are alike are told apart only within one."""
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
    thinking = _thinking(lark, formats, rules)
    form = CALL_FORMATS.get(formats.calls or "") if rules.calls else None
    if form is None:
        return f"{thinking} TEXT" if rules.content is None else f"{thinking} SPACE? {_content(lark, rules.content)}"
    if rules.must_call:
        return f"{thinking} SPACE? {_calls_alone(lark, form, rules)}"
    if rules.content is not None:
        return f"{thinking} SPACE? ({_content(lark, rules.content)} | {_calls_alone(lark, form, rules)})"
    if rules.restricted or any(call.enforced for call in rules.calls):
        return f"{thinking} {_calls_in_text(lark, form, rules)}"
    return f"{thinking} {_calls_as_they_come(lark, form)}"


def _thinking(lark: Lark, formats: AnswerFormats, rules: AnswerRules) -> str:
    tags = THINK_TAGS.get(formats.thinking or "")
    if tags is None and rules.max_thinking_tokens is not None:
        raise cannot("this model does not think, as far as its chat template tells", "max_thinking_tokens")
    if tags is None:
        return ""
    closed = lark.until(tags.closes, rules.max_thinking_tokens)
    return closed if rules.opened else f"({lark.marker(tags.opens)} {closed})?"


def _calls_alone(lark: Lark, form: CallFormat, rules: AnswerRules) -> str:
    spelled = SPELLED[form.name](lark, rules.calls, rules.one_call)
    section = lark.rule(spelled.section if form.bare else f"{lark.marker(form.begins[0])} {spelled.section}")
    if rules.one_call or spelled.between is None:
        return section
    return f"{section} ({literal(spelled.between)} {section})*" if spelled.between else f"{section}+"


def _calls_in_text(lark: Lark, form: CallFormat, rules: AnswerRules) -> str:
    """Text, in which what follows a marker of calls is one, or at whose head there are some."""
    section = lark.rule(SPELLED[form.name](lark, rules.calls, rules.one_call).section)
    unmarked = call_in_text(form, [call.name for call in rules.calls])
    called = f"({lark.until(form.begins[0], without=unmarked)} {section})*"
    if not form.bare:
        return f"{called} {lark.without(unmarked)}"
    other = lark.other_than(form.bare, unmarked)
    return f"(SPACE? {section} | {lark.marker(form.begins[0])} {section} | {other})"


def _calls_as_they_come(lark: Lark, form: CallFormat) -> str:
    """Text with all markers of calls that are tokens."""
    tokens = sorted(token for word in form.spellings if (token := lark.table.added(word)) is not None)
    return f"(TEXT <[{','.join(map(str, tokens))}]>)* TEXT" if tokens else "TEXT"


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
