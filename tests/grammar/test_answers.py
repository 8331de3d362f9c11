"""Whatever may be sampled where a call must be made is read as that call, in every format."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from forebay.base.errors import InvalidRequest
from forebay.grammar.answers import AnswerRules, answer_grammar, can_limit_thinking
from forebay.grammar.compiler import compiled
from forebay.grammar.lark import CallRule
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.answers.formats import CALL_PARSERS, CHANNEL_SPELLINGS, CHANNELS
from forebay.text.answers.parts import CallArguments, CallBegun, Said, Thought
from forebay.text.answers.reading import AnswerFormats, reader_for
from forebay.text.token_bytes import TokenBytes
from tests.text.answers.spellings import SPELLINGS, Answer

SCHEMA = {
    "type": "object",
    "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 99}},
    "properties": {
        "kind": {"type": "string", "enum": ["a b", 'c"{}', "é"]},
        "few": {"$ref": "#/$defs/few"},
        "on": {"type": "boolean"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "last": {"anyOf": [{"type": "null"}, {"const": 7}]},
    },
    "required": ["kind", "on"],
    "additionalProperties": False,
}
CALLS = [CallRule("get-it", SCHEMA, True, "tools.0"), CallRule("get", {**SCHEMA, "required": []}, True, "tools.1")]
TOOLS = {call.name: call.parameters for call in CALLS}
END = 256


class Vocabulary:
    """Bytes, the end, and with `words` as tokens of their own, which may be `special`."""

    def __init__(self, words: set[str], *, special: bool) -> None:
        self.pieces = [*map(chr, range(256)), "<end>", *sorted(words)]
        added = set(range(END, len(self.pieces)))
        self.special_token_ids = sorted(added) if special else [END]
        self.table = TokenBytes(
            list(self.pieces), lambda piece: piece.encode("latin-1"), added, set(self.special_token_ids)
        )
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.pieces))

    bos_token_id = None
    eos_token_id = END

    @property
    def tokens(self) -> list[bytes]:
        return [self.table.spelled(token) for token in range(len(self.pieces))]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def matcher(self, grammar: Grammar | None) -> LLMatcher:
        assert grammar is not None
        return compiled(grammar, self.tokenizer)

    def said(self, grammar: Grammar | None, seed: int) -> str:
        """What a model without a mind says under a grammar: it ends, or writes a marker, where it can, half of the
        time."""
        matcher, rng, out = self.matcher(grammar), random.Random(seed), b""
        while True:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(self.pieces)) if mask[i // 8] >> (i % 8) & 1]
            if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return out.decode()
            marks = [token for token in allowed if token > END]
            token = rng.choice(marks if marks and rng.random() < 0.5 else [token for token in allowed if token != END])
            assert matcher.consume_token(token), matcher.get_error()
            out += self.table.spelled(token)
            assert len(out) < 3000


def formats(name: str) -> AnswerFormats:
    return AnswerFormats(name, CHANNELS if name == CHANNELS else None)


def read(
    form: AnswerFormats, text: str, *, opened: bool = False, tools: Any = TOOLS
) -> tuple[list[tuple[str, Any]], str, str]:
    """The calls, what was said and what was thought."""
    reader = reader_for(form, tools, opened=opened)
    parts = reader.push(text) + reader.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    said, thought = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Said, Thought))
    return [(name, json.loads(arguments)) for name, arguments in calls], said, thought


@pytest.fixture(scope="module", params=["special", "tokens", "text"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    marks = {word for name in CALL_PARSERS for word in formats(name).spellings} | {"<think>", "</think>"}
    marks -= {"```"}  # which is of no vocabulary
    if request.param == "text":
        return Vocabulary(set(CHANNEL_SPELLINGS), special=True)
    return Vocabulary(marks, special=request.param == "special")


@pytest.mark.parametrize("name", CALL_PARSERS)
@pytest.mark.parametrize("must_call", [True, False])
def test_calls_are_what_their_tools_take(vocabulary: Vocabulary, name: str, must_call: bool) -> None:
    form = formats(name)
    if name == CHANNELS and len(vocabulary.table.skipped) == 1:
        pytest.skip("their markers are special in every model that has them")
    grammar = answer_grammar(form, vocabulary.table, AnswerRules(calls=CALLS, must_call=must_call))
    for seed in range(4):
        alone = AnswerRules(calls=[CALLS[seed % 2]], must_call=True, one_call=True)
        text = vocabulary.said(answer_grammar(form, vocabulary.table, alone), seed)
        ((tool, arguments),), said, _ = read(form, text)
        assert tool == CALLS[seed % 2].name
        jsonschema_rs.validate(TOOLS[tool], arguments)
        assert not said or name == CHANNELS
        assert vocabulary.matcher(grammar).consume_tokens(tokens_of(vocabulary, text))
    for tool, arguments in read(form, vocabulary.said(grammar, 5) if must_call else text)[0]:
        jsonschema_rs.validate(TOOLS[tool], arguments)
    free = vocabulary.matcher(grammar).try_consume_tokens(tokens_of(vocabulary, "It is 5."))
    assert (free == 0) == (must_call or name == CHANNELS)


TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
RUN = CallRule("run", TEXT, True, "tools.0", 'start: "a\\n" B\nB: /["x]{2,3}/')


@pytest.mark.parametrize("name", CALL_PARSERS)
def test_text_of_a_tool_with_a_grammar_is_what_the_grammar_takes(name: str) -> None:
    form = formats(name)
    known = Vocabulary(set(form.spellings) - {"```"}, special=True)
    grammar = answer_grammar(form, known.table, AnswerRules(calls=[RUN], must_call=True, one_call=True))
    for seed in range(2):
        reader = reader_for(form, {"run": TEXT})
        parts = reader.push(known.said(grammar, seed)) + reader.finish()
        arguments = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
        assert re.fullmatch(r'a\n["x]{2,3}', arguments["input"]), arguments


@pytest.mark.parametrize("name", ["llama3_json", "hermes", "pythonic", "glm45"])
@pytest.mark.parametrize("marks", [("<MY_CALLS>", "</MY_CALLS>"), ("<MY_CALLS>", "")])
def test_calls_between_marks_of_a_template_are_begun_by_these_and_read(name: str, marks: tuple[str, str]) -> None:
    form, known = AnswerFormats(name, None, marks), Vocabulary({"<MY_CALLS>"}, special=True)
    in_text = answer_grammar(form, known.table, AnswerRules(calls=CALLS))
    for seed in range(2):
        alone = AnswerRules(calls=CALLS, must_call=True, one_call=True)
        text = known.said(answer_grammar(form, known.table, alone), seed)
        assert text.strip().startswith(marks[0])
        ((tool, arguments),), said, _ = read(form, text)
        jsonschema_rs.validate(TOOLS[tool], arguments)
        assert said == ""
        assert known.matcher(in_text).consume_tokens(tokens_of(known, text))
    said = '{"a": [1]} is not a call'
    assert known.matcher(in_text).consume_tokens(tokens_of(known, said))


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """The markers as tokens, the rest as bytes."""
    words = {piece: token for token, piece in enumerate(vocabulary.pieces) if token > END}
    pieces = re.split("(" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + ")", text)
    return [token for piece in pieces for token in ([words[piece]] if piece in words else piece.encode())]


THINKING = AnswerFormats("hermes", "think")
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [1, "x"]}')


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "minimax_m2", "glm45", "gigachat3"])
def test_enforced_call_cannot_be_written_within_the_thinking(vocabulary: Vocabulary, name: str) -> None:
    """A reader would take it for one."""
    form = AnswerFormats(name, "think")
    assert form.call_format is not None
    must, may = AnswerRules(calls=CALLS, must_call=True), AnswerRules(calls=CALLS)
    for rules, marks in ((must, form.call_format.marks), (may, form.call_format.begins)):
        grammar = answer_grammar(form, vocabulary.table, rules)
        for mark in marks:
            tokens = tokens_of(vocabulary, f"<think>So: {mark} </think>")
            assert vocabulary.matcher(grammar).try_consume_tokens(tokens) < len(tokens), mark
        tokens = tokens_of(vocabulary, "<think>So: <b> </think>")
        assert vocabulary.matcher(grammar).try_consume_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("text", "fits"),
    [('<think>"?</think>\n\n"x"', True), ("1", True), ("<think>1</think>2", False), ("<think>1", True), ("x", False)],
)
def test_a_grammar_begins_behind_the_thinking(vocabulary: Vocabulary, text: str, fits: bool) -> None:
    rules = AnswerRules(content=JSON)
    for opened in (False, True):
        matcher = vocabulary.matcher(answer_grammar(THINKING, vocabulary.table, replace(rules, opened=opened)))
        tokens = tokens_of(vocabulary, text.removeprefix("<think>") if opened else text)
        fits_here = fits or (opened and "</think>" not in text)  # it goes on thinking
        assert (matcher.validate_tokens(tokens) == len(tokens)) == fits_here
        ends = "</think>" in text or (not opened and text == "1")
        assert not fits_here or (matcher.consume_tokens(tokens) and matcher.is_accepting() == ends)


def test_an_answer_in_a_form_may_be_a_call_instead(vocabulary: Vocabulary) -> None:
    rules = AnswerRules(calls=CALLS, content=JSON, opened=True)
    grammar = answer_grammar(THINKING, vocabulary.table, rules)
    for text, fits in (
        ("1", True),
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', True),
        ("2", False),
    ):
        tokens = tokens_of(vocabulary, f"</think>{text}")
        assert (vocabulary.matcher(grammar).validate_tokens(tokens) == len(tokens)) == fits


@pytest.mark.parametrize("form", [THINKING, formats(CHANNELS)])
@pytest.mark.parametrize("most", [0, 3])
def test_thinking_ends_when_its_tokens_are_used_up(vocabulary: Vocabulary, form: AnswerFormats, most: int) -> None:
    free = [call._replace(enforced=False) for call in CALLS]
    rules = AnswerRules(calls=free, max_thinking_tokens=most, opened=form is THINKING)
    can = form is not THINKING or "</think>" in vocabulary.pieces
    assert can_limit_thinking(form, vocabulary.table) == can
    if not can:
        with pytest.raises(InvalidRequest, match="no token") as caught:
            answer_grammar(form, vocabulary.table, rules)
        assert caught.value.param == "max_thinking_tokens"
        return
    matcher = vocabulary.matcher(answer_grammar(form, vocabulary.table, rules))
    before, end = ("", "</think>") if form is THINKING else ("<|channel|>analysis<|message|>", "<|end|>")
    for token in tokens_of(vocabulary, before + "x" * most):
        matcher.compute_bitmask()
        assert matcher.consume_token(token)
    mask = matcher.compute_bitmask()
    assert [i for i in range(len(vocabulary.pieces)) if mask[i // 8] >> (i % 8) & 1] == tokens_of(vocabulary, end)
    behind = "<tool_call>so</tool_call>" if form is THINKING else "<|start|>assistant<|channel|>final<|message|>so"
    assert matcher.consume_tokens(tokens_of(vocabulary, end + behind))
    assert matcher.is_accepting()


def test_where_nothing_is_to_be_enforced_there_is_no_grammar(vocabulary: Vocabulary) -> None:
    free = [call._replace(enforced=False) for call in CALLS]
    for form in (AnswerFormats(), THINKING, formats(CHANNELS)):
        assert answer_grammar(form, vocabulary.table, AnswerRules(calls=free)) is None
    assert answer_grammar(AnswerFormats("hermes"), vocabulary.table, AnswerRules(content=JSON)) is JSON


BROKEN = {"$ref": "#/nowhere", "properties": {"a": {"type": "any", "pattern": "(?!x)"}}, "required": ["a"]}
FREE = CallRule("free", BROKEN, False, "tools.1")
ANY_ARGUMENTS = {"other": [1, {"a": None}], "text": "x y", "n": 5}


@pytest.mark.parametrize("name", SPELLINGS)
def test_call_of_a_tool_that_is_not_enforced_has_any_arguments_beside_one_that_is(
    vocabulary: Vocabulary, name: str
) -> None:
    """With a schema that does not compile."""
    spelling = SPELLINGS[name]
    form = spelling.formats
    if form.calls == CHANNELS and len(vocabulary.table.skipped) == 1:
        pytest.skip("their markers are special in every model that has them")
    if form.calls == "mistral" and (name == "mistral") != (vocabulary.table.added("[ARGS]") is not None):
        pytest.skip("the other form of these")
    if name == "longcat_tags":
        pytest.skip("the other form of these")
    text = spelling.spell(Answer(calls=(("free", json.dumps(ANY_ARGUMENTS)),))).removesuffix("<|call|>")
    for space in ("[TOOL_CALLS] ", "<tool_call>\nfree"):  # which the grammar does not write there
        text = text.replace(space, "".join(space.split()))
    tokens = tokens_of(vocabulary, text)
    for content in (None, JSON):
        grammar = answer_grammar(form, vocabulary.table, AnswerRules(calls=[CALLS[0], FREE], content=content))
        matcher = vocabulary.matcher(grammar)
        assert matcher.validate_tokens(tokens) == len(tokens), text
    reader = reader_for(form, {**TOOLS, "free": BROKEN})
    parts = reader.push(text) + reader.finish()
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments) == ANY_ARGUMENTS


def test_what_text_cannot_be_held_to_is_refused_by_its_field(vocabulary: Vocabulary) -> None:
    strict = CallRule("f", {"properties": {"at": {"type": "string", "pattern": "^a"}}}, True, "tools.3.function")
    with pytest.raises(InvalidRequest, match="pattern of at") as caught:
        answer_grammar(AnswerFormats("glm45"), vocabulary.table, AnswerRules(calls=[strict], must_call=True))
    assert (caught.value.code, caught.value.param) == ("grammar_invalid", "tools.3.function")
