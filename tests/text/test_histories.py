"""Histories as clients send them are shown whole, in their order, by templates that take less."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.text.answers.probes import Findings, find_formats
from forebay.text.histories import ANY_HISTORY, HistoryRules, adapted
from forebay.text.resumption import IMAGE_CHARS, Breakpoint
from forebay.text.tokenizer import Tokenizer
from tests.text.in_process import templates_in_this_process
from tests.text.tiny_tokenizer import tiny_tokenizer

_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments}"
    " | tojson }}\n</tool_call>{% endfor %}"
)
_SHOWN = "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
_TOOLS = "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
_ALTERNATES = (
    "{% set n = namespace(i=0) %}{% for m in messages if m.role not in ['system', 'tool'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endfor %}"
)


def _each(before: str) -> str:
    return _TOOLS + "{% for m in messages %}" + before + _SHOWN + "{% endfor %}" + _END


TEMPLATES = {  # what the templates of these models refuse or drop
    "Qwen 2.5": (_each(""), HistoryRules()),
    "Qwen 3.5": (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query.') }}"
        "{% endif %}"
        + _each("{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}{% endif %}"),
        HistoryRules(more_systems=False, later_system=False, without_user=False),
    ),
    "MiniMax M2": (
        _each("{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"),
        HistoryRules(more_systems=False, later_system=False),
    ),
    "DeepSeek R1": (
        "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}"
        "{% endfor %}{{ n.s }}" + _each("{% if m.role == 'system' %}{% continue %}{% endif %}"),
        HistoryRules(more_systems=False, later_system=False),
    ),
    "Gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}" + _END,
        HistoryRules(system=False, more_systems=False, later_system=False, without_user=False, repeats=False),
    ),
    "Mistral": (
        _ALTERNATES + _each("{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}"),
        HistoryRules(more_systems=False, later_system=False, repeats=False, after_result=False),
    ),
}
U, MORE = {"role": "user", "content": "Hi."}, {"role": "user", "content": "More."}
A, S, S2 = (
    {"role": role, "content": text} for role, text in (("assistant", "Ok."), ("system", "One."), ("system", "Two."))
)
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "Done.", "tool_call_id": "call00000"}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "a system text first": [S, U],
    "two": [S, S2, U],
    "between": [S, U, A, S2, MORE],
    "last": [U, S],
    "behind an answer": [U, A, S, MORE],
    "alone": [S],
    "before an answer": [U, S, A, MORE],
    "two questions": [U, MORE],
    "two answers": [U, A, A, MORE],
    "text beside a result": [U, CALL, RESULT, MORE],
    "a system text behind a result": [U, CALL, RESULT, S],
    "a system text between call and result": [U, CALL, S, RESULT],
    "two results and two texts": [U, CALL, RESULT, RESULT, S, MORE],
}


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with templates_in_this_process():
        yield


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, Findings]:
    template, rules = TEMPLATES[request.param]
    tokenizer = tiny_tokenizer(template=template)
    found = find_formats(tokenizer)
    assert found.history == rules
    return tokenizer, found


@pytest.mark.parametrize("name", HISTORIES)
def test_history_that_a_template_takes_less_of_is_shown_whole(model: tuple[Tokenizer, Findings], name: str) -> None:
    tokenizer, found = model
    messages = HISTORIES[name]
    if CALL in messages and found.ignores_tools:
        pytest.skip("its calls and results are texts of turns")
    history = adapted(messages, found.history)
    text = tokenizer.render(history.messages)
    said = [message["content"] for message in messages if message["content"]]
    assert all(text.count(each) >= said.count(each) for each in said)
    if found.history == ANY_HISTORY:
        assert history.messages == messages


def test_history_that_no_rule_helps_is_refused_in_the_words_of_the_template(model: tuple[Tokenizer, Findings]) -> None:
    tokenizer, found = model
    if found.history.repeats:
        return
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.render(adapted([A, U], found.history).messages)


RULES = [
    HistoryRules(
        system=system, more_systems=more, later_system=later, without_user=alone, repeats=repeats, after_result=after
    )
    for system, more, later, alone, repeats, after in product((True, False), repeat=6)
]


def test_random_histories_keep_each_text_and_where_it_begins() -> None:
    rng = random.Random(5)
    for number in range(1500):
        rules = rng.choice(RULES)
        messages = [_random_message(rng, f"{number}.{i}") for i in range(rng.randint(1, 7))]
        history = adapted(messages, rules)
        for i, message in enumerate(messages):
            whole, own = _letters(message["content"]), history.moved(Breakpoint(i, 0))
            there = _letters(history.messages[own.message]["content"])
            assert there[own.num_chars : own.num_chars + len(whole)] == whole
        assert _calls(history.messages) == _calls(messages)
        _keeps_rules(history.messages, rules)
        assert messages == [dict(message) for message in messages]


def _random_message(rng: random.Random, name: str) -> dict[str, Any]:
    role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool"])
    content: Any = rng.choice(["", f"<{name}>", f"<{name}>"])
    if role in ("user", "tool") and rng.random() < 0.3:
        content = [{"type": "text", "text": f"<{name}>"}, {"type": "image"}, {"type": "text", "text": "!"}]
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant" and rng.random() < 0.5:
        made |= {"tool_calls": [{"id": name}], "content": rng.choice([content, None]), "reasoning_content": f"t{name}"}
    return made


def _letters(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(part.get("text", "\0" * IMAGE_CHARS) for part in content)


def _calls(messages: list[dict[str, Any]]) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls", ())]


def _keeps_rules(messages: list[dict[str, Any]], rules: HistoryRules) -> None:
    roles = [message["role"] for message in messages]
    at_start = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    assert rules.system or "system" not in roles
    assert rules.more_systems or at_start <= 1
    assert rules.later_system or "system" not in roles[at_start:]
    for before, role in pairwise(roles):
        assert rules.repeats or before != role or role not in ("user", "assistant")
        assert rules.after_result or (before, role) != ("tool", "user")


def test_joined_answers_keep_their_thinking_in_order() -> None:
    one, other = ({**A, "content": None, "reasoning_content": text, "thinking": text} for text in ("a", "b"))
    made = adapted([U, one, {**other, "content": "So."}, MORE], HistoryRules(repeats=False)).messages
    assert made[1] == {"role": "assistant", "content": "So.", "reasoning_content": "a\n\nb", "thinking": "a\n\nb"}
    called = adapted([U, {**one, "tool_calls": [1]}, {**A}], HistoryRules(repeats=False)).messages[1]
    assert (called["content"], called["tool_calls"], "thinking" in called) == ("Ok.", [1], False)
