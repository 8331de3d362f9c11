"""Answers are read as what they are, however they come, and whatever they are cut off at."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from forebay.text.answers.argument_types import is_text
from forebay.text.answers.cursor import Cursor
from forebay.text.answers.formats import CALL_PARSERS, CITING
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought
from forebay.text.answers.reading import AnswerFormats, reader_for
from tests.text.answers.spellings import ANSWERS, SPELLINGS, TOOLS, Answer, Spelling

MARKER_BEGUN = re.compile(r"\s*(?:[<\[][^<\[]*|H(?:e(?:r(?:e(?: [^.]*)?)?)?)?)$")
every_format = pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)


def read(formats: AnswerFormats, pieces: Sequence[str]) -> list[Part]:
    reader = reader_for(formats, TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert all(part.text for part in parts if isinstance(part, Said | Thought | CallArguments))
    return parts


def joined(parts: list[Part]) -> tuple[Answer, list[str]]:
    """What was said, thought and called; and in which order, kinds that follow each other once."""
    said = "".join(part.text for part in parts if isinstance(part, Said))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    assert [part.call for part in parts if isinstance(part, CallBegun)] == list(range(len(names)))
    assert [part.call for part in parts if isinstance(part, CallEnded)] == list(range(len(names)))
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    kinds = [type(part).__name__ for part in parts]
    order = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    return Answer(said, thought, tuple(zip(names, arguments, strict=True))), order


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(len(text) // 3))})
    return [text[begin:end] for begin, end in pairwise(places)]


@every_format
def test_a_stored_answer_is_read_as_what_was_meant(spelling: Spelling) -> None:
    assert len(ANSWERS) >= 30
    for answer in ANSWERS:
        found, _ = joined(read(spelling.formats, [spelling.spell(answer)]))
        assert (found.said, found.thought) == (answer.said, answer.thought)
        assert [name for name, _ in found.calls] == [name for name, _ in answer.calls]
        for (_, text), (_, wanted) in zip(found.calls, answer.calls, strict=True):
            assert text == wanted if spelling.copies else json.loads(text) == json.loads(wanted)


@every_format
@pytest.mark.parametrize("text", ["  \n", "\n\n"])
def test_an_answer_of_white_space_alone_is_text(spelling: Spelling, text: str) -> None:
    found, _ = joined(read(spelling.formats, [text]))
    assert (found.said, found.thought, found.calls) == (text, "", ())


@pytest.mark.quick(2)
@every_format
def test_however_the_text_is_cut_the_parts_are_the_same(spelling: Spelling) -> None:
    rng = random.Random(5)
    for answer in ANSWERS:
        text = spelling.spell(answer)
        whole = joined(read(spelling.formats, [text]))
        ends = range(1, len(text)) if len(text) < 300 else rng.sample(range(1, len(text)), 30)
        for end in ends:
            assert joined(read(spelling.formats, [text[:end], text[end:]])) == whole
        assert joined(read(spelling.formats, list(text))) == whole
        assert joined(read(spelling.formats, cuts(text, rng))) == whole


@every_format
def test_an_answer_that_is_cut_off_is_the_beginning_of_the_whole(spelling: Spelling) -> None:
    rng = random.Random(7)
    for answer in ANSWERS:
        text = spelling.spell(answer)
        (said, thought, calls), _ = joined(read(spelling.formats, [text]))
        for end in rng.sample(range(len(text) + 1), min(len(text), 10)):
            part, order = joined(read(spelling.formats, [text[:end]]))
            assert (part, order) == joined(read(spelling.formats, cuts(text[:end], rng)))
            assert thought.startswith(MARKER_BEGUN.sub("", part.thought))
            assert said.startswith(part.said) or part.said.startswith(said) or text[:end].endswith(part.said)
            for (name, arguments), (wanted_name, wanted) in zip(part.calls, calls, strict=False):
                assert name == wanted_name
                assert wanted.startswith(arguments) or not spelling.copies


NO_CALLS = {
    "hermes": ["<tool_call>", "<tool_call>none</tool_call>", '<tool_call>{"a": 1}</tool_call>', "a <tool_cal b"],
    "mimo": ["<tool_call>\n<function=>\n</function>", "<tool_call>\n<functions>", "<tool_call><function=a b>"],
    "qwen3_coder": ["<tool_call>\n<function=>\n</function>", "<tool_call>\n<functions>", "<tool_call><function=a b>"],
    "minimax_m2": ["<minimax:tool_call>\n<invoke>", '<minimax:tool_call><invoke name="a b">', '<invoke name="other">'],
    "glm45": ["<tool_call>two words\n<arg_key>", "<tool_call>" + "x" * 600 + "<arg_key>a</arg_key>"],
    "llama3_json": [
        '{"name": "Bob", "age": 3}',
        '{"a": [1]}',
        '{"name": "Bob", "parameters": {}}',
        "{",
        "<|python_tag|>x",
    ],
    "pythonic": ["[1, 2, 3]", "[unknown(a=1)]", "[get_weather]", "["],
    "lfm2": ["<|tool_call_start|>none<|tool_call_end|>", "[get_weather(city='x')]"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS]no call" + " at all" * 100 + "[ARGS]{}"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>function\n```json\n{}"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|> <|tool_call_argument_begin|>{}"],
    "hunyuan": ["<tool_calls>", "<tool_calls>[none]</tool_calls>", '<tool_calls>[{"a": 1}]</tool_calls>'],
    "granite": ["<|tool_call|>", "<|tool_call|>[1]", "<function_call>{}", "Here is my thought"],
    "cohere": ["<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>none", '<|START_ACTION|>[{"name": "f"}]'],
    "command_r": ["Action: none", "Action: ```json\n[1]\n```", "```json\n{}\n```"],
    "internlm": ["<|action_start|><|plugin|>none", "<|action_start|>", "<|action_end|>"],
    "apertus": [
        "<|tools_prefix|>none",
        "<|tools_prefix|>[]",
        '<|tools_prefix|>[{"f": 1}]',
        '<|tools_prefix|>{"f": {}}',
    ],
    "phi4_mini": ["import functools", "functools[0]", "functools[]", 'functools{"name": "f"}'],
    "longcat": ["<longcat_tool_call>two words\n<longcat_arg_key>", "<longcat_tool_call>[]"],
    "solar_open": ["<|tool_calls|>none", "<|tool_call:begin|>id<|tool_call:args|>{}"],
    "deepseek_v32": ["<｜DSML｜function_calls>\n<｜DSML｜invoke>", '<｜DSML｜invoke name="other">'],
    "deepseek_v4": ["<｜DSML｜tool_calls>", '<｜DSML｜tool_calls><｜DSML｜invoke name="a b">'],
    "hy_v3": ["<tool_calls>\n</tool_calls>", "<tool_calls><tool_call>two words<tool_sep>", "<tool_call>f<tool_sep>"],
    "hy_v3_opensource": ["<tool_calls:opensource>none", "<tool_calls><tool_call>f<tool_sep></tool_call>"],
    "olmo3": ["<function_calls>\n</function_calls>", "<function_calls>no call</function_calls>", "f(a=1)"],
    "xlam": ["[1, 2]", '[{"name": "Bob", "age": 3}]', '```json\n{"name": "Bob", "arguments": {}}\n```', "[", "```"],
    "nemotron": ["<TOOLCALL>", "<TOOLCALL>[none]</TOOLCALL>", '<TOOLCALL>[{"a": 1}]</TOOLCALL>', "<TOOLCALL>[]"],
    "gigachat3": ["function call", "function call<|role_sep|>\nnone", "<|function_call|>[]", "function call of f"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:<tool_call|>", "<|tool_call>f{}<tool_call|>", 'call:f{a:"b"}'],
    "seed_oss": ["<seed:tool_call>\n</seed:tool_call>", "<seed:tool_call><function=a b>", "<function=other>"],
    "glm4": ["get_weather", "get_weather\nnone", 'other\n{"city": "x"}', 'get_weather {"city": "x"}'],
    "gpt_oss": ["no channels at all", "<|channel|>final", "<|channel|>" + "y" * 600],
}


def test_every_format_has_texts_that_only_resemble_its_calls() -> None:
    assert set(NO_CALLS) == set(CALL_PARSERS)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_turns_out_to_be_no_call_is_said_character_for_character(name: str, text: str) -> None:
    formats = SPELLINGS[name].formats
    for pieces in ([text], list(text), cuts(text, random.Random(3))):
        assert joined(read(formats, pieces))[0] == Answer(text)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>',
         Answer(calls=(("f", '{"a": "}"}'),))),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> ok', Answer(" ok", calls=(("f", "{}"),))),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call>', Answer(calls=(("f", '{"a": {}'),))),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>',
         Answer(calls=(("f", "{}"), ("g", "{}")))),
        ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
         Answer("<tool_call>", calls=(("f", "{}"),))),
        ("hermes", "<think></think>x", Answer("x")),
        ("hermes", "x <think>y</think>", Answer("x <think>y</think>")),
        ("hermes", "<think>never closed ", Answer("", "never closed")),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n1\n</parameter>stray</tool_call>",
         Answer("stray</tool_call>", calls=(("f", '{"a": 1}'),))),
        ("qwen3_coder", "<tool_call><function=write_file><parameter=text>\n\n 1\n\n</parameter></function></tool_call>",
         Answer(calls=(("write_file", '{"text": "\\n 1\\n"}'),))),
        ("mimo", "<tool_call><function=write_file><parameter=text>\n\n 1\n\n</parameter></function></tool_call>",
         Answer(calls=(("write_file", '{"text": "\\n\\n 1\\n\\n"}'),))),
        ("pythonic", "[get_weather(city='it\\'s \\u00e9 \"x\"', n=(1,), m={'k': None,}), search()]",
         Answer(calls=(("get_weather", '{"city": "it\'s é \\"x\\"", "n": [1], "m": {"k":null}}'), ("search", "{}")))),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', Answer(calls=(("f", '{"a": 1}'),))),
        ("gpt_oss", '<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary json'
         '<|message|>{}<|call|>', Answer("", "a", (("f", "{}"),))),
    ],
)  # fmt: skip
def test_what_models_also_write(name: str, text: str, wanted: Answer) -> None:
    for pieces in ([text], list(text)):
        assert joined(read(SPELLINGS[name].formats, pieces))[0] == wanted


def test_thinking_opened_by_the_prompt_is_separated_from_the_answer() -> None:
    reader = reader_for(AnswerFormats(None, "think"), None, opened=True)
    assert reader.thinking
    assert reader.push("Well.\n</think>\n\nYes <tool_call>") == [Thought("Well."), Said("Yes <tool_call>")]
    assert not reader.thinking


def test_text_is_shown_as_it_comes_but_for_what_may_be_a_marker() -> None:
    reader = reader_for(AnswerFormats("hermes", None), TOOLS)
    assert reader.push("1 <") == [Said("1 ")]
    assert reader.push(" 2") == [Said("< 2")]
    assert reader.push('<tool_call>{"name": "f", "argu') == []
    assert reader.push('ments": {"a') == [CallBegun(0, "f"), CallArguments(0, '{"a')]
    assert reader.push('": "b') == [CallArguments(0, '": "b')]


@every_format
def test_the_time_it_takes_grows_with_the_text_alone(spelling: Spelling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in characters that are handed out, however the text comes."""
    steps = 0
    peek, take = Cursor.peek, Cursor.take

    def counted_peek(cursor: Cursor, count: int = 1):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += count
        return peek(cursor, count)

    def counted_take(cursor: Cursor, count: int) -> str:
        nonlocal steps
        steps += count
        return take(cursor, count)

    monkeypatch.setattr(Cursor, "peek", counted_peek)
    monkeypatch.setattr(Cursor, "take", counted_take)
    hard = "".join(spelling.spell(answer) for answer in ANSWERS[5:15]) + "".join(
        NO_CALLS.get(spelling.formats.calls or "", [])
    )
    counts = []
    for times in (1, 2):
        steps = 0
        read(spelling.formats, [hard * times])
        read(spelling.formats, list(hard * times))
        counts.append(steps)
    assert counts[1] <= 2.2 * counts[0]


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"oneOf": "x"}, {"enum": 7}, {"type": {}}, {"anyOf": [1, None]}, 5])
def test_a_tools_schema_that_is_none_says_of_no_argument_that_it_is_text(schema):
    assert not is_text({"properties": {"a": schema}}, "a")


CITED = [
    ("It is <co>20 degrees</co: 0:[0]> in <co>Oslo</co: 0:[0,1],1:[2]>.", "It is 20 degrees in Oslo."),
    ("It is <co: 0>20 degrees</co: 0>.", "It is 20 degrees."),
    ("<co>a</co: 0:[0]>\n\n<co>b</co: 1:[]>", "a\n\nb"),
    ("Use <code>x</code>, <co, <company> or </cool>.", "Use <code>x</code>, <co, <company> or </cool>."),
    ("Cut off <co>in the tag</co: 0:[", "Cut off in the tag</co: 0:["),
]


@pytest.mark.parametrize("name", sorted(CITING))
@pytest.mark.parametrize(("text", "said"), CITED)
def test_tags_beside_citations_are_left_out_at_every_split(name: str, text: str, said: str) -> None:
    formats = SPELLINGS[name].formats
    for at in range(len(text) + 1):
        assert joined(read(formats, [text[:at], text[at:]]))[0].said == said
    assert joined(read(formats, list(text)))[0].said == said
    assert joined(read(SPELLINGS["hermes"].formats, [text]))[0].said == text, "a model that cites nothing"


def test_call_behind_the_beginning_of_a_citation_is_read() -> None:
    called = Answer("", "", (("get_weather", '{"city": "Oslo"}'),))
    text = "No <co " + SPELLINGS["cohere"].spell(called)
    found, _ = joined(read(SPELLINGS["cohere"].formats, [text]))
    assert (found.said.strip(), found.calls) == ("No <co", called.calls)
