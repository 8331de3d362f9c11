"""A model's formats are found by what its chat template writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.base.errors import ConfigError
from forebay.text.answers.for_template import for_template
from forebay.text.answers.formats import CALL_NAMES, CALL_PARSERS, DECLARING_NAMES, REASONING_NAMES, REASONING_PARSERS
from forebay.text.answers.parts import CallArguments, CallBegun, Said, Thought
from forebay.text.answers.probes import Findings, Wanted, find_formats
from forebay.text.answers.reading import AnswerFormats, reader_for
from forebay.text.answers.tools_as_text import tools_as_text
from tests.text.answers.spellings import TOOLS
from tests.text.answers.templates import MANNERS, QWEN3, SEED, Manner
from tests.text.in_process import templates_in_this_process
from tests.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer

CALLS: list[Any] = [
    {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for i, (name, arguments) in enumerate([("get_weather", {"city": "Oslo"}), ("search", {"query": "x", "limit": 3})])
]
TOLD: list[Any] = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
PARSER_NAMES: Final = json.loads(Path(__file__).with_name("parser_names.json").read_text())
NAMED_DIFFERENTLY: Final = {("SGLang 0.5.23", "hunyuan")}  # Hy3's there, Hunyuan-A13B's here and in the other engine


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with templates_in_this_process():
        yield


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_formats_are_found_in_templates_of_each_manner(manner: Manner) -> None:
    tokenizer = tiny_tokenizer(600, manner.template)
    found = find_formats(tokenizer)
    assert found.formats == AnswerFormats(manner.calls, manner.thinking, manner.marks)
    how = (found.ignores_tools, found.calls.as_text, found.calls.hidden, found.calls.one_call)
    assert how == (manner.ignores, manner.as_text, manner.hidden, manner.one_call)
    assert found.variables == manner.switches
    prompt = tokenizer.render([{"role": "user", "content": "Hi."}])
    assert found.opens_thinking(prompt) == manner.opens
    assert set(found.evidence) == {"tool_calls", "reasoning"}


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_a_conversation_with_calls_is_written_as_the_model_writes_them(manner: Manner) -> None:
    tokenizer = tiny_tokenizer(600, manner.template)
    found = find_formats(tokenizer)
    asked = [{"role": "user", "content": "Hi."}]
    answer = {"role": "assistant", "content": None, "tool_calls": CALLS}
    results = [{"role": "tool", "content": f"result {i}", "tool_call_id": call["id"]} for i, call in enumerate(CALLS)]

    def written(messages: list[Any], **options: Any) -> str:
        variables = {"tools": TOLD}
        return tokenizer.render(for_template(messages, variables, found), **variables, **options)

    before = written(asked)
    whole = written([*asked, answer, *results])
    assert [whole.count(result["content"]) for result in results] == [1, 1]
    assert all(tool["function"]["name"] in before for tool in TOLD)
    said = written([*asked, answer], add_generation_prompt=False)
    said = said.removeprefix(written(asked, add_generation_prompt=False))
    reader = reader_for(found.formats, TOOLS)
    parts = [*reader.push(said), *reader.finish()]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == [call["function"]["name"] for call in CALLS]
    if manner.one_call:
        assert whole.index("result 0") < whole.index("search", len(before) - 8) < whole.index("result 1")
    assert "None" not in whole


@pytest.mark.parametrize("name", ["DeepSeek V3.1 alone", "DeepSeek R1"])
def test_tools_are_told_of_in_the_form_in_which_the_template_shows_calls(name: str) -> None:
    tokenizer = tiny_tokenizer(600, MANNERS[name].template)
    found = find_formats(tokenizer)
    variables: dict[str, Any] = {"tools": TOLD}
    told = for_template([{"role": "user", "content": "Hi."}], variables, found)[0]["content"]
    example = told.partition("does not exist, and nothing behind the last call:\n")[2]
    reader = reader_for(found.formats, {"probe_tool": {}})
    assert [part.name for part in reader.push(example) if isinstance(part, CallBegun)] == ["probe_tool"]
    assert "tool_call>" not in told
    assert not variables


def test_a_result_out_of_order_follows_its_call_and_one_of_no_call_is_kept() -> None:
    found = Findings(calls=Wanted(one_call=True), ignores_tools=False)
    results = [{"role": "tool", "content": text, "tool_call_id": call} for text, call in
               [("b", "call_1"), ("a", "call_0"), ("c", "call_9")]]  # fmt: skip
    answer = {"role": "assistant", "content": "Both.", "tool_calls": CALLS}
    shown = for_template([answer, *results, {"role": "user", "content": "So?"}], {}, found)
    assert [message["content"] for message in shown] == ["Both.", "a", None, "b", "c", "So?"]
    assert [len(message.get("tool_calls", ())) for message in shown] == [1, 0, 1, 0, 0, 0]


def test_a_flag_says_what_no_template_tells_and_a_wrong_one_is_refused() -> None:
    tokenizer = tiny_tokenizer(600, QWEN3)
    found = find_formats(tokenizer, calls="none", thinking="none")
    assert (found.formats.calls, found.formats.thinking) == (None, None)
    assert found.evidence == {"tool_calls": "--tool-call-parser none", "reasoning": "--reasoning-parser none"}
    marks = ("<tool_call>", "</tool_call>")
    assert find_formats(tokenizer, calls="llama3", thinking="mistral").formats == AnswerFormats(
        "llama3_json", "mistral", marks
    )
    with pytest.raises(ConfigError, match=r"--tool-call-parser: 'mine' is not one of auto, none, hermes"):
        find_formats(tokenizer, calls="mine")
    for names, known in ((CALL_NAMES, CALL_PARSERS), (REASONING_NAMES, REASONING_PARSERS)):
        assert set(names.values()) <= set(known)
        assert not set(names) & set(known)
    with pytest.raises(ConfigError, match=r"--tool-call-parser mistral: the chat template writes nothing of tools"):
        find_formats(tiny_tokenizer(600), calls="mistral")


@pytest.mark.parametrize("engine", PARSER_NAMES)
def test_parser_names_of_other_engines_have_their_format_here_or_are_refused(engine: str) -> None:
    """`parser_names.json` has the format of each name; null if it is none of ours."""
    tokenizer = tiny_tokenizer(600, QWEN3)
    for kind, flag, names, known in (
        ("tool", "--tool-call-parser", CALL_NAMES, CALL_PARSERS),
        ("reasoning", "--reasoning-parser", REASONING_NAMES, REASONING_PARSERS),
    ):
        for name, wanted in PARSER_NAMES[engine][kind].items():
            option = {"calls" if kind == "tool" else "thinking": name}
            if wanted is None:
                with pytest.raises(ConfigError, match=rf"{flag}: '{name}' is not one of auto, none, .*{known[-1]}"):
                    find_formats(tokenizer, **option)
            elif name in known:
                assert name == wanted or (engine, name) in NAMED_DIFFERENTLY
            else:
                assert names.get(name, "auto" if name in DECLARING_NAMES else "") == wanted


def test_named_parser_of_the_inner_form_reads_the_marks_that_the_template_writes_around_it() -> None:
    """As of an operator who names qwen3_coder for Seed-OSS, which writes the same between marks of its own."""
    found = find_formats(tiny_tokenizer(600, SEED), calls="qwen3_coder")
    reader = reader_for(found.formats, TOOLS)
    call = "<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>"
    parts = reader.push(f"<seed:think>I look.</seed:think>\n<seed:tool_call>\n{call}\n</seed:tool_call>")
    parts += reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, Said)).strip() == ""
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == "I look."
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["get_weather"]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"city": "Oslo"}'


def test_a_template_that_ignores_tools_is_told_of_them_in_text() -> None:
    found = find_formats(tiny_tokenizer())
    assert (found.formats.calls, found.ignores_tools) == ("hermes", True)
    assert "nothing of tools" in found.evidence["tool_calls"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    told = tools_as_text([*asked, {"role": "tool", "content": "r", "tool_call_id": "c"}], tools)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert '{"name": "f"}' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_thinking_that_the_template_opens_is_found_and_seen_in_each_prompt() -> None:
    closes = "{% if enable_thinking is false %}</think>{% endif %}"
    opens = TEMPLATE.replace("assistant\n{%", f"assistant\n<think>\n{closes}{{%")
    found = find_formats(tiny_tokenizer(template=opens))
    assert found.formats.thinking == "think"
    assert found.variables == {"enable_thinking"}
    assert found.opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not found.opens_thinking("<|im_start|>assistant\n<think>\n</think>")
