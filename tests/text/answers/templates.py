"""Chat templates of ours in the manner of well-known models': what each writes of tools, calls, results and thinking,
what it refuses, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

_OPEN = "{% if add_generation_prompt %}"
_JSON = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}'
_EACH = "{% for c in m.tool_calls or [] %}"
_FUNCTION = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_TAGS = "<tool_call>\n{}\n</tool_call>"

# Qwen 2.5, Hermes 2 Pro, Qwen 3: tools within tags, told of with an example; results are a user's.
_CHATML = (
    "{% if tools %}<|im_start|>system\nTools: <tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>\n"
    f"{_TAGS.format('EXAMPLE')}<|im_end|>\n{{% endif %}}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.content is string %}THOUGHT{{ m.content }}{% endif %}CALLS<|im_end|>\n{% endfor %}"
    f"{_OPEN}<|im_start|>assistant\nBEGIN{{% endif %}}"
)


def _chatml(example: str, calls: str, thought: str = "", begin: str = "") -> str:
    text = _CHATML.replace("EXAMPLE", example).replace("CALLS", calls).replace("THOUGHT", thought)
    return text.replace("BEGIN", begin)


_HERMES = _EACH + _TAGS.format(_JSON % "arguments") + "{% endfor %}"
_KEPT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_CODER = (
    f"{_FUNCTION}<tool_call>\n<function={{{{ f.name }}}}>\n{{% for k, v in f.arguments | items %}}<parameter="
    f"{{{{ k }}}}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
QWEN25 = _chatml('{"name": "NAME", "arguments": {}}', _HERMES)
QWEN3 = _chatml('{"name": "NAME", "arguments": {}}', _HERMES, _KEPT, _OFF)
QWEN3_THINKING = _chatml('{"name": "NAME", "arguments": {}}', _HERMES, _KEPT, "<think>\n")
QWEN3_CODER = _chatml("<function=NAME>\n</function>", _CODER)
MIMO = _chatml(
    "<function=NAME>\n</function>",
    _CODER.replace("{{ k }}>\n", "{{ k }}>").replace("\n</parameter>", "</parameter>"),
    _KEPT,
    _OFF,
)

# Llama 3: one call a message, tools in front of the user's text, results of a role of their own.
LLAMA = (
    "{% for m in messages %}"
    "{% if m.tool_calls is defined and m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}"
    "{% endif %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'user' and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{% if m.tool_calls is defined %}{% set c = m.tool_calls[0] %}"
    + _JSON % "parameters"
    + "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    + _OPEN
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA4 = (
    "{% if tools %}<|header_start|>system<|header_end|>\n\n{{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{% if m.tool_calls %}<|python_start|>["
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]"
    "<|python_end|>{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    f"{_OPEN}<|header_start|>assistant<|header_end|>\n\n{{% endif %}}"
)

# Mistral: ids of nine characters, and none other; roles alternate.
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}"
    "{% endif %}{% endfor %}"
    "CALLS</s>{% else %}THOUGHT{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL = _MISTRAL.replace("THOUGHT", "").replace(
    "CALLS",
    '[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]",
)
MAGISTRAL = _MISTRAL.replace(
    "THOUGHT", "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
).replace(
    "CALLS",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)

# DeepSeek: arguments are text that is added to text; V3.1 thinks where it is told to, R1 always.
_DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ CALL }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    f"{{% endif %}}<｜end▁of▁sentence｜>{{% endif %}}{{% endfor %}}{_OPEN}<｜Assistant｜>BEGIN{{% endif %}}"
)
_V3_CALL = "'function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```'"
_TOLD = "{{ 'Tools: ' + tools | tojson if tools else '' }}"
DEEPSEEK_R1 = _DEEPSEEK.replace("CALL }", _V3_CALL + " }").replace("BEGIN", "<think>\n")
DEEPSEEK_V3 = _TOLD + _DEEPSEEK.replace("CALL }", _V3_CALL + " }").replace("BEGIN", "")
DEEPSEEK_V31 = _TOLD + _DEEPSEEK.replace(
    "CALL }", "c.function.name + '<｜tool▁sep｜>' + c.function.arguments }"
).replace("BEGIN", "{{ '<think>' if thinking else '</think>' }}")

# GLM 4.5: an empty thought in front of what is said, a word behind the user's text where none is wanted.
GLM45 = (
    "{% if tools %}<|system|>\n"
    "{{ tools | tojson }}\n<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
    "</tool_call>{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif m.role == 'tool' %}<|observation|>\n"
    "{{ m.content }}{% else %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>"
    "{% endfor %}\n</tool_call>"
    f"{{% endfor %}}{{% endif %}}{{% endfor %}}{_OPEN}<|assistant|>{{{{ "
    "'\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)

# MiniMax M2: the thinking begins in the prompt; all calls of an answer are in one section.
MINIMAX_M2 = (
    "{% if tools %}]~b]system\n<tools>{% for t in tools %}<tool>{{ t.function | tojson }}</tool>{% endfor %}</tools>\n"
    '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n'
    "</minimax:tool_call>[e~[\n{% endif %}{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n'
    f"{{% endfor %}}</minimax:tool_call>{{% endif %}}{{% endif %}}[e~[\n{{% endfor %}}{_OPEN}]~b]ai\n<think>\n"
    "{% endif %}"
)

# Kimi K2: a call's head is its id, which has the name in it; a content that is none has no parts.
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% endif %}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    f"<|tool_calls_section_end|>{{% endif %}}<|im_end|>"
    f"{{% endfor %}}{_OPEN}<|im_assistant|>assistant<|im_middle|>{{% endif %}}"
)

# LFM 2: calls in Python; the older one writes none of them.
LFM2 = (
    "{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>"
    "{{ tools | tojson }}<|tool_list_end|><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    f"{_OPEN}<|im_start|>assistant\n{{% endif %}}"
)
LFM25 = LFM2.replace(
    "CALLS",
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else ', ' }}{% endfor %}]<|tool_call_end|>{% endif %}",
)
LFM2 = LFM2.replace("CALLS", "")

# gpt-oss: channels, how much to think in the system text, and the name of whoever called in front of a result.
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.thinking and m.content %}{{ raise_exception('thinking or content') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    f"{{% endfor %}}{_OPEN}<|start|>assistant{{% endif %}}"
)

# Hunyuan: tools and an example of calls in front of the first message; calls are one list.
HUNYUAN = (
    "<|startoftext|>{% if tools %}Tools: {{ tools | tojson }}\n"
    '<tool_calls>[{"name": "NAME", "arguments": {}}]</tool_calls><|extra_4|>{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response><|extra_0|>"
    "{% else %}{{ m.content or '' }}{% if m.tool_calls %}<tool_calls>["
    + _EACH
    + _JSON % "arguments"
    + "{{ '' if loop.last else ', ' }}{% endfor %}]</tool_calls>{% endif %}"
    "{{ '<|eos|>' if m.role == 'assistant' else '<|extra_0|>' }}{% endif %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
)


# Seed-OSS: marks of its own around the tags of Qwen 3 Coder, and values on the line of their tag.
SEED = (
    "{% if tools %}<seed:bos>system\n{{ tools | tojson }}<seed:eos>{% endif %}{% for m in messages %}<seed:bos>"
    "{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}"
    "</seed:think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<seed:tool_call>\n<function="
    "{{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>\n"
    "{% endfor %}</function>\n</seed:tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<seed:eos>{% endfor %}"
    f"{_OPEN}<seed:bos>assistant\n{{% endif %}}"
)

# Nemotron Nano 2: a list between marks; the thinking begins in the prompt.
NEMOTRON = (
    "<SPECIAL_10>System\n{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}\n"
    "{% for m in messages %}{% if m.role == 'tool' %}<SPECIAL_11>User\n<TOOL_RESPONSE>[{{ m.content }}]"
    "</TOOL_RESPONSE>\n{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content or '' }}"
    "{% if m.tool_calls %}<TOOLCALL>["
    + _EACH
    + _JSON % "arguments"
    + "{{ ', ' if not loop.last else '' }}{% endfor %}]</TOOLCALL>{% endif %}\n<SPECIAL_12>\n\n"
    "{% else %}<SPECIAL_11>{{ m.role }}\n{{ m.content }}\n{% endif %}{% endfor %}"
    f"{_OPEN}<SPECIAL_11>Assistant\n<think>\n\n{{% endif %}}"
)
OTHER_MARKS = NEMOTRON.replace("TOOLCALL", "MY_CALLS")  # of no format that is known

# GigaChat 3: the first call alone, as a message of its own.
GIGACHAT = (
    "{% if tools %}function descriptions<|role_sep|>\n{{ tools | tojson }}<|message_sep|>\n\n{% endif %}"
    "{% for m in messages %}{{ 'function result' if m.role == 'tool' else m.role }}<|role_sep|>\n{{ m.content or '' }}"
    "<|message_sep|>\n\n{% if m.tool_calls %}{% set c = m.tool_calls[0] %}function call<|role_sep|>\n"
    + _JSON
    % "arguments"
    + "<|message_sep|>\n\n{% endif %}{% endfor %}"
    f"{_OPEN}assistant<|role_sep|>\n{{% endif %}}"
)

# Gemma 4: keys without quotes, texts between marks; without thinking an empty thought stands in the prompt.
GEMMA4 = (
    '{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, x in v | dictsort %}{{ k }}:{{ show(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% else %}"
    "{{ v | tojson }}{% endif %}{% endmacro %}{% if tools or enable_thinking %}<|turn>system\n"
    "{{ '<|think|>' if enable_thinking else '' }}{% for t in tools or [] %}<|tool>{{ t.function.name }}<tool|>"
    "{% endfor %}<turn|>\n{% endif %}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ show(c.function.arguments) }}"
    "<tool_call|>{% endfor %}{{ m.content or '' }}<turn|>\n{% endfor %}"
    f"{_OPEN}<|turn>model\n{{% if not enable_thinking %}}<|channel>thought\n<channel|>{{% endif %}}{{% endif %}}"
)

# Command A: an action is a list with names of its own; what is said has a frame.
COHERE = (
    "{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ tools | tojson }}<|END_OF_TURN_TOKEN|>{% endif %}"
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}"
    "{% if m.tool_calls %}<|START_ACTION|>[\n{% for c in m.tool_calls %}    "
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{{ '' if loop.last else ',' }}\n{% endfor %}]<|END_ACTION|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% elif m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}<|END_TOOL_RESULT|>"
    "{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    f"{_OPEN}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{% endif %}}"
)
COMMAND_R = _chatml(
    "Action: NAME",
    "{% if m.tool_calls %}Action: ```json\n[{% for c in m.tool_calls %}"
    '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]\n```{% endif %}",
)

# Granite 3: a list behind a marker; a variable turns on thinking between sentences.
_ASKS_TO_THINK = "Write your thoughts after 'Here is my thought process:', and 'Here is my response:' behind them."
GRANITE = _chatml(
    "<|tool_call|>[NAME]",
    "{% if m.tool_calls %}<|tool_call|>["
    + _EACH
    + _JSON % "arguments"
    + "{{ ', ' if not loop.last else '' }}{% endfor %}]{% endif %}",
).replace("{% for m", f"{{% if thinking %}}{_ASKS_TO_THINK}{{% endif %}}{{% for m", 1)

# Hy3: tags with a suffix, a section around all calls, thinking that begins in the prompt.
_HY3 = (
    "{% if tools %}<｜hy_System｜>{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<｜hy_Assistant｜><thinkS>{{ m.reasoning_content or '' }}</thinkS>{{ m.content or '' }}{% if m.tool_calls %}"
    "<tool_callsS>\n{% for c in m.tool_calls %}<tool_callS>{{ c.function.name }}<tool_sepS>\n"
    "{% for k, v in c.function.arguments.items() %}<arg_keyS>{{ k }}</arg_keyS>\n"
    "<arg_valueS>{{ v if v is string else v | tojson }}</arg_valueS>\n{% endfor %}</tool_callS>\n{% endfor %}"
    "</tool_callsS>{% endif %}<｜hy_eos｜>{% elif m.role == 'tool' %}<tool_responses>{{ m.content }}</tool_responses>"
    "{% else %}<｜hy_User｜>{{ m.content }}{% endif %}{% endfor %}"
    f"{_OPEN}<｜hy_Assistant｜><thinkS>{{% endif %}}"
)
HY3, HY3_OPENSOURCE = _HY3.replace("S>", ">"), _HY3.replace("S>", ":opensource>")

# Solar Open: a message of its own for thinking, words and calls.
SOLAR = (
    "{% if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.content or not m.tool_calls %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|begin|>assistant<|tool_calls|>{% for c in m.tool_calls %}<|tool_call:begin|>{{ c.id }}"
    "<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}<|tool_call:end|>"
    "{% endfor %}<|calls|>{% endif %}{% else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endif %}"
    f"{{% endfor %}}{_OPEN}<|begin|>assistant{{% endif %}}"
)

# OLMo 3: Python, a line each. DeepSeek V3.2 and V4: values that say whether they are texts. ERNIE: a framed answer.
OLMO3 = _chatml(
    "<function_calls>NAME()</function_calls>",
    "{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else '\\n' }}{% endfor %}</function_calls>{% endif %}",
    _KEPT,
)
_DSML = _chatml(
    "<｜DSML｜OUTER>NAME</｜DSML｜OUTER>",
    '{% if m.tool_calls %}<｜DSML｜OUTER>\n{% for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="'
    "{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n"
    "{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜OUTER>{% endif %}",
    _KEPT,
)
DSML_V32, DSML_V4 = _DSML.replace("OUTER", "function_calls"), _DSML.replace("OUTER", "tool_calls")
_FRAMED = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n<FRAME>\n{% endif %}"
ERNIE = _chatml("NAME", _HERMES, _FRAMED.replace("FRAME", "response"))
HUNYUAN_ANSWER = HUNYUAN.replace(
    "{{ m.content or '' }}{% if m.tool_calls %}", _FRAMED.replace("FRAME", "answer") + "{{ m.content or '' }}"
    "{% if m.tool_calls %}",
)  # fmt: skip
LONGCAT = (
    _chatml("NAME", _HERMES, _KEPT).replace("tool_call>", "longcat_tool_call>").replace("think>", "longcat_think>")
)
INTERNLM = _chatml("NAME", _EACH + "<|action_start|><|plugin|>\n" + _JSON % "parameters" + "<|action_end|>{% endfor %}")
PHI4_MINI = QWEN25[QWEN25.index("{% for m") :].replace(
    "<|im_start|>", "{% if loop.first and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|im_start|>", 1
).replace(_HERMES, "")  # fmt: skip
XLAM = _chatml(
    "NAME",
    "{% if m.tool_calls %}["
    + _EACH
    + _JSON % "arguments"
    + "{{ ', ' if not loop.last else '' }}{% endfor %}]{% endif %}",
)

# Apertus: one member for each call, results in the assistant's own message.
APERTUS = (
    "<|developer_start|>Deliberation: {{ 'enabled' if enable_thinking else 'disabled' }}\n"
    "Tool Capabilities:{{ tools | tojson if tools else ' disabled' }}<|developer_end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant_start|>{% if m.reasoning_content %}<|inner_prefix|>"
    "{{ m.reasoning_content }}<|inner_suffix|>{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<|tools_prefix|>["
    + _EACH
    + "{\"{{ c.function.name }}\": {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last else '' }}"
    "{% endfor %}]<|tools_suffix|>{% endif %}<|assistant_end|>{% elif m.role == 'tool' %}[{{ m.content }}]"
    "{% else %}<|{{ m.role }}_start|>{{ m.content }}<|{{ m.role }}_end|>{% endif %}{% endfor %}"
    f"{_OPEN}<|assistant_start|>{{% endif %}}"
)

# GLM 4: calls and results by fields of the template's own, tools in a text that says how to call.
GLM4 = (
    "{% if tools %}<|system|>\n# 可用工具{% for t in tools %}\n\n{{ t.function | tojson }}\n"
    "在调用上述函数时，请使用 Json 格式表示调用的参数。{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.metadata %}<|assistant|>{{ m.metadata }}\n{{ m.content }}"
    "{% elif m.role in ('system', 'user', 'assistant', 'observation') %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    f"{{% endfor %}}{_OPEN}<|assistant|>{{% endif %}}"
)

# DeepSeek V3.1 as it is published: nothing of tools, and calls in a form of its own.
DEEPSEEK_V31_ALONE = DEEPSEEK_V31.removeprefix(_TOLD)
# Calls are shown, results are not: such a history can be shown in text alone.
RESULTS_LEFT_OUT = QWEN25[QWEN25.index("{% for m") :].replace(
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% elif",
    "{% if m.role == 'tool' %}{% elif",
)


class Manner(NamedTuple):
    """What is to be found in a template."""

    template: str
    calls: str
    thinking: str | None = None
    switches: frozenset[str] = frozenset()
    opens: bool = False  # the thinking, in the prompt
    as_text: bool = False
    ignores: bool = False
    hidden: bool = False
    one_call: bool = False  # of a message
    marks: tuple[str, str] = ("", "")


MANNERS = {
    "Hermes, Qwen 2.5": Manner(QWEN25, "hermes"),
    "Qwen 3": Manner(QWEN3, "hermes", "think", frozenset({"enable_thinking"})),
    "Qwen 3 Thinking": Manner(QWEN3_THINKING, "hermes", "think", opens=True),
    "Qwen 3 Coder": Manner(QWEN3_CODER, "qwen3_coder"),
    "MiMo V2": Manner(MIMO, "mimo", "think", frozenset({"enable_thinking"})),
    "Llama 3.1 and 3.2": Manner(LLAMA, "llama3_json", one_call=True),
    "Llama 4": Manner(LLAMA4, "pythonic"),
    "Mistral": Manner(MISTRAL, "mistral"),
    "Magistral": Manner(MAGISTRAL, "mistral", "mistral"),
    "DeepSeek V3": Manner(DEEPSEEK_V3, "deepseek_v3", as_text=True),
    "DeepSeek V3.1": Manner(DEEPSEEK_V31, "deepseek_v31", "think", frozenset({"thinking"}), as_text=True),
    "DeepSeek V3.1 alone": Manner(
        DEEPSEEK_V31_ALONE, "deepseek_v31", "think", frozenset({"thinking"}), as_text=True, ignores=True
    ),
    "DeepSeek R1": Manner(DEEPSEEK_R1, "deepseek_v3", "think", opens=True, as_text=True, ignores=True),
    "results left out": Manner(RESULTS_LEFT_OUT, "hermes", ignores=True, hidden=True),
    "Seed-OSS": Manner(SEED, "seed_oss", "seed_oss"),
    "Nemotron Nano 2": Manner(NEMOTRON, "nemotron", "think", opens=True),
    "other marks": Manner(OTHER_MARKS, "llama3_json", "think", opens=True, marks=("<MY_CALLS>", "</MY_CALLS>")),
    "GigaChat 3": Manner(GIGACHAT, "gigachat3", one_call=True),
    "Gemma 4": Manner(GEMMA4, "gemma4", "gemma4", frozenset({"enable_thinking"})),
    "GLM 4.5": Manner(GLM45, "glm45", "think", frozenset({"enable_thinking"})),
    "MiniMax M2": Manner(MINIMAX_M2, "minimax_m2", "think", opens=True),
    "Kimi K2": Manner(KIMI_K2, "kimi_k2"),
    "Hunyuan": Manner(HUNYUAN, "hunyuan", "think", frozenset({"enable_thinking"})),
    "LFM 2": Manner(LFM2, "lfm2", hidden=True),
    "LFM 2.5": Manner(LFM25, "lfm2"),
    "Command A": Manner(COHERE, "cohere", "cohere"),
    "Command R": Manner(COMMAND_R, "command_r"),
    "Granite 3": Manner(GRANITE, "granite", "granite", frozenset({"thinking"})),
    "Hy3": Manner(HY3, "hy_v3", "think", opens=True),
    "Hy3 as published": Manner(HY3_OPENSOURCE, "hy_v3_opensource", "hy_v3_opensource", opens=True),
    "Solar Open": Manner(SOLAR, "solar_open", "solar_open"),
    "OLMo 3": Manner(OLMO3, "olmo3", "think"),
    "DeepSeek V3.2": Manner(DSML_V32, "deepseek_v32", "think"),
    "DeepSeek V4": Manner(DSML_V4, "deepseek_v4", "think"),
    "ERNIE 4.5": Manner(ERNIE, "hermes", "ernie45"),
    "Hunyuan with a frame": Manner(HUNYUAN_ANSWER, "hunyuan", "hunyuan", frozenset({"enable_thinking"})),
    "LongCat": Manner(LONGCAT, "longcat", "longcat"),
    "InternLM": Manner(INTERNLM, "internlm"),
    "Phi-4 mini": Manner(PHI4_MINI, "phi4_mini", hidden=True),
    "Apertus": Manner(APERTUS, "apertus", "apertus", frozenset({"enable_thinking"})),
    "xLAM": Manner(XLAM, "xlam"),
    "GLM 4": Manner(GLM4, "glm4", hidden=True),
    "gpt-oss": Manner(GPT_OSS, "gpt_oss", "gpt_oss", frozenset({"reasoning_effort"}), one_call=True),
}
