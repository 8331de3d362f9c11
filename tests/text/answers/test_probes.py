"""A model's formats are found by what its chat template writes."""

from __future__ import annotations

import pytest

from forebay.text.answers.probes import find_formats
from forebay.text.answers.telling import told_in_text
from tests.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer

HEAD = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
)
TAIL = "{{ m.content or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for c in m.tool_calls or [] %}"
NAMED = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
HERMES = f"{HEAD}{LOOP}<tool_call>\n{NAMED}\n</tool_call>{{% endfor %}}{TAIL}"
CODER = (
    f"{HEAD}{LOOP}<tool_call>\n<function={{{{ c.function.name }}}}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    f"</function>\n</tool_call>{{% endfor %}}{TAIL}"
)
LLAMA = HEAD + LOOP + NAMED.replace('"arguments"', '"parameters"') + "{% endfor %}" + TAIL
DEEPSEEK = (
    f"{HEAD}{LOOP}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    f"{{% endfor %}}{TAIL}"
)


@pytest.mark.parametrize(
    ("template", "name", "takes_text"),
    [(HERMES, "hermes", False), (CODER, "qwen3_coder", False), (LLAMA, "llama3_json", False),
     (DEEPSEEK, "deepseek_v31", True)],
)  # fmt: skip
def test_the_format_of_calls_is_that_in_which_the_template_writes_one(
    template: str, name: str, takes_text: bool
) -> None:
    found = find_formats(tiny_tokenizer(template=template))
    assert (found.formats.calls, found.ignores_tools, found.takes_text) == (name, False, takes_text)
    assert "probe_tool" in found.evidence["tool_calls"]
    assert found.formats.thinking is None


def test_a_template_that_ignores_tools_is_told_of_them_in_text() -> None:
    found = find_formats(tiny_tokenizer())
    assert (found.formats.calls, found.ignores_tools) == ("hermes", True)
    assert "nothing of tools" in found.evidence["tool_calls"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    told = told_in_text([*asked, {"role": "tool", "content": "r", "tool_call_id": "c"}], tools)
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
