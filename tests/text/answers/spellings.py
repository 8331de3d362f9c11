"""What a model of each format writes for an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.text.answers.reading import AnswerFormats


class Answer(NamedTuple):
    said: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and the JSON of arguments


ANSWERS = [
    Answer(case.get("said", ""), case.get("thought", ""), tuple((name, text) for name, text in case.get("calls", ())))
    for case in json.loads(Path(__file__).with_name("answers.json").read_text())
]
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}}},
    "search": {
        "type": "object",
        "properties": {
            "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "limit": {"type": "number"},
            "filter": {"type": "object"},
        },
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}


def think(answer: Answer) -> str:
    return f"<think>\n{answer.thought}\n</think>\n\n" if answer.thought else ""


def blocks(write: Callable[[str, str], str]) -> Callable[[Answer], str]:
    def spell(answer: Answer) -> str:
        calls = [f"<tool_call>\n{write(name, text)}\n</tool_call>" for name, text in answer.calls]
        return think(answer) + answer.said + "\n".join(calls)

    return spell


def _object(name: str, text: str, member: str = "arguments") -> str:
    return f'{{"name": "{name}", "{member}": {text}}}'


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tags(name: str, text: str, line: str = "\n") -> str:
    values = json.loads(text).items()
    inside = "".join(f"<parameter={key}>{line}{_raw(value)}{line}</parameter>\n" for key, value in values)
    return f"<function={name}>\n{inside}</function>"


def minimax(answer: Answer) -> str:
    """All calls stand in one section."""
    calls = "".join(f"{_invoke(name, text)}\n" for name, text in answer.calls)
    section = f"<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    return think(answer) + answer.said + section


def _invoke(name: str, text: str) -> str:
    values = json.loads(text).items()
    inside = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in values)
    return f'<invoke name="{name}">\n{inside}</invoke>'


def _glm(name: str, text: str) -> str:
    values = json.loads(text).items()
    return "\n".join(
        [name, *(f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>" for key, value in values)]
    )


def _python(answer: Answer) -> str:
    calls = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(text).items())})"
        for name, text in answer.calls
    )
    return f"[{', '.join(calls)}]" if answer.calls else ""


def llama(answer: Answer) -> str:
    tag = "<|python_tag|>" if answer.said else ""
    calls = "; ".join(_object(name, text, "parameters") for name, text in answer.calls)
    return think(answer) + answer.said + (tag + calls if calls else "")


def pythonic(answer: Answer) -> str:
    calls = _python(answer)
    wrapped = f"<|python_start|>{calls}<|python_end|>" if answer.said and calls else calls
    return think(answer) + answer.said + wrapped


def lfm2(answer: Answer) -> str:
    calls = _python(answer)
    return think(answer) + (f"<|tool_call_start|>{calls}<|tool_call_end|>" if calls else "") + answer.said


def _mistral_thought(answer: Answer) -> str:
    return f"[THINK]{answer.thought}[/THINK]" if answer.thought else ""


def mistral_list(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return _mistral_thought(answer) + answer.said + (f"[TOOL_CALLS] [{calls}]" if calls else "")


def mistral(answer: Answer) -> str:
    calls = "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in answer.calls)
    return _mistral_thought(answer) + answer.said + calls


def deepseek(write: Callable[[str, str], str]) -> Callable[[Answer], str]:
    def spell(answer: Answer) -> str:
        calls = "\n".join(f"<｜tool▁call▁begin｜>{write(name, text)}<｜tool▁call▁end｜>" for name, text in answer.calls)
        return think(answer) + answer.said + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")

    return spell


def kimi(answer: Answer) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for i, (name, text) in enumerate(answer.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return think(answer) + answer.said + section


def hunyuan(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return think(answer) + answer.said + (f"<tool_calls>[{calls}]</tool_calls>" if calls else "")


def nemotron(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return think(answer) + answer.said + (f"<TOOLCALL>[{calls}]</TOOLCALL>" if calls else "")


def gigachat(answer: Answer) -> str:
    """A message of its own for each call."""
    texts = [answer.said] if answer.said or not answer.calls else []
    texts += [f"function call<|role_sep|>\n{_object(name, text)}" for name, text in answer.calls]
    return think(answer) + "<|message_sep|>\n\n".join(texts)


def seed(answer: Answer) -> str:
    thought = f"<seed:think>{answer.thought}</seed:think>\n" if answer.thought else ""
    calls = [f"<seed:tool_call>\n{_tags(name, text, line='')}\n</seed:tool_call>" for name, text in answer.calls]
    return thought + answer.said + "\n".join(calls)


def gemma(answer: Answer) -> str:
    thought = f"<|channel>thought\n{answer.thought}\n<channel|>" if answer.thought else ""
    calls = (
        f"<|tool_call>call:{name}{{{_gemma_members(json.loads(text))}}}<tool_call|>" for name, text in answer.calls
    )
    return thought + answer.said + "".join(calls)


def _gemma_members(values: dict[str, Any]) -> str:
    return ",".join(f"{key}:{_gemma_value(value)}" for key, value in values.items())


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{_gemma_members(value)}}}"
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case _:
            return json.dumps(value)


def gpt_oss(answer: Answer) -> str:
    messages = [f"<|channel|>analysis<|message|>{answer.thought}"] if answer.thought else []
    if answer.said or not (answer.thought or answer.calls):
        messages.append(f"<|channel|>{'commentary' if answer.calls else 'final'}<|message|>{answer.said}")
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}" for name, text in answer.calls
    ]
    return "<|end|><|start|>assistant".join(messages) + ("<|call|>" if answer.calls else "")


def _framed(begin: str, end: str, *, layout: tuple[str, str] = ("", "")) -> Callable[[Answer], str]:
    """Thinking between these, and around the text behind it such tags."""

    def spell(answer: Answer) -> str:
        thought = f"{begin}{answer.thought}{end}" if answer.thought else ""
        framed = layout[0] and answer.said[:1].strip()  # white space beside a tag is of it
        said = f"{layout[0]}{answer.said}{layout[1]}" if framed else answer.said
        return thought + said

    return spell


def _behind(write: Callable[[Answer], str], before: Callable[[Answer], str] = think) -> Callable[[Answer], str]:
    """Calls behind the text."""
    if before is think:
        return lambda answer: think(answer) + answer.said + (write(answer) if answer.calls else "")
    return lambda answer: before(answer) + (write(answer) if answer.calls else "")


def _listed(name: str = "name", member: str = "arguments") -> Callable[[Answer], str]:
    def spell(answer: Answer) -> str:
        calls = (f'{{"{name}": "{call}", "{member}": {text}}}' for call, text in answer.calls)
        return f"[{', '.join(calls)}]"

    return spell


def _apertus(answer: Answer) -> str:
    calls = ", ".join(f'{{"{name}": {text}}}' for name, text in answer.calls)
    return f"<|tools_prefix|>[{calls}]<|tools_suffix|>"


def _cohere(answer: Answer) -> str:
    calls = enumerate(answer.calls)
    listed = (f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {text}}}' for i, (name, text) in calls)
    inside = ",\n    ".join(listed)
    return f"<|START_ACTION|>[\n    {inside}\n]<|END_ACTION|>"


def _solar(answer: Answer) -> str:
    calls = (
        f"<|tool_call:begin|>id{i}<|tool_call:name|>{name}<|tool_call:args|>{text}<|tool_call:end|>"
        for i, (name, text) in enumerate(answer.calls)
    )
    return f"<|begin|>assistant<|tool_calls|>{''.join(calls)}<|calls|>"


def _solar_before(answer: Answer) -> str:
    thought = f"<|think|>{answer.thought}<|end|><|begin|>assistant" if answer.thought else ""
    said = f"<|content|>{answer.said}<|end|>" if answer.said[:1].strip() else answer.said
    return thought + said


def _dsml(outer: str) -> Callable[[Answer], str]:
    def one(name: str, text: str) -> str:
        inside = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_raw(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in json.loads(text).items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'

    def spell(answer: Answer) -> str:
        calls = "".join(one(name, text) for name, text in answer.calls)
        return f"<｜DSML｜{outer}>\n{calls}</｜DSML｜{outer}>"

    return spell


def _hy3(suffix: str) -> Callable[[Answer], str]:
    def one(name: str, text: str) -> str:
        pairs = (
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{_raw(value)}</arg_value{suffix}>\n"
            for key, value in json.loads(text).items()
        )
        return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{''.join(pairs)}</tool_call{suffix}>\n"

    def spell(answer: Answer) -> str:
        calls = "".join(one(name, text) for name, text in answer.calls)
        return f"<tool_calls{suffix}>\n{calls}</tool_calls{suffix}>"

    return spell


def _longcat_tags(answer: Answer) -> str:
    def one(name: str, text: str) -> str:
        pairs = (
            f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{_raw(value)}</longcat_arg_value>\n"
            for key, value in json.loads(text).items()
        )
        return f"<longcat_tool_call>{name}\n{''.join(pairs)}</longcat_tool_call>"

    return "\n".join(one(name, text) for name, text in answer.calls)


def _each(begin: str, end: str, member: str = "arguments") -> Callable[[Answer], str]:
    return lambda answer: "\n".join(f"{begin}{_object(name, text, member)}{end}" for name, text in answer.calls)


def _olmo(answer: Answer) -> str:
    calls = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(text).items())})"
        for name, text in answer.calls
    )
    lines = "\n".join(calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


class Spelling(NamedTuple):
    formats: AnswerFormats
    spell: Callable[[Answer], str]
    copies: bool = True  # arguments are JSON in the answer


def _glm4(answer: Answer) -> str:
    """A message of its own for each call."""
    turn = "<|assistant|>"
    return (turn if answer.said else "") + turn.join(f"{name}\n{text}" for name, text in answer.calls)


SPELLINGS = {
    "hermes": Spelling(AnswerFormats("hermes", "think"), blocks(_object)),
    "qwen3_coder": Spelling(AnswerFormats("qwen3_coder", "think"), blocks(_tags), copies=False),
    "mimo": Spelling(AnswerFormats("mimo", "think"), blocks(lambda name, text: _tags(name, text, "")), copies=False),
    "minimax_m2": Spelling(AnswerFormats("minimax_m2", "think"), minimax, copies=False),
    "seed_oss": Spelling(AnswerFormats("seed_oss", "seed_oss"), seed, copies=False),
    "nemotron": Spelling(AnswerFormats("nemotron", "think"), nemotron),
    "gigachat3": Spelling(AnswerFormats("gigachat3", "think"), gigachat),
    "gemma4": Spelling(AnswerFormats("gemma4", "gemma4"), gemma, copies=False),
    "marked": Spelling(AnswerFormats("llama3_json", "think", ("<TOOLCALL>", "</TOOLCALL>")), nemotron),
    "glm45": Spelling(AnswerFormats("glm45", "think"), blocks(_glm), copies=False),
    "llama3_json": Spelling(AnswerFormats("llama3_json", "think"), llama),
    "pythonic": Spelling(AnswerFormats("pythonic", "think"), pythonic, copies=False),
    "lfm2": Spelling(AnswerFormats("lfm2", "think"), lfm2, copies=False),
    "mistral_list": Spelling(AnswerFormats("mistral", "mistral"), mistral_list),
    "mistral": Spelling(AnswerFormats("mistral", "mistral"), mistral),
    "deepseek_v3": Spelling(
        AnswerFormats("deepseek_v3", "think"),
        deepseek(lambda name, text: f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"),
    ),
    "deepseek_v31": Spelling(
        AnswerFormats("deepseek_v31", "think"), deepseek(lambda name, text: f"{name}<｜tool▁sep｜>{text}")
    ),
    "kimi_k2": Spelling(AnswerFormats("kimi_k2", "think"), kimi),
    "hunyuan": Spelling(AnswerFormats("hunyuan", "think"), hunyuan),
    "gpt_oss": Spelling(AnswerFormats("gpt_oss", "gpt_oss"), gpt_oss),
    "granite": Spelling(
        AnswerFormats("granite", "granite"),
        _behind(
            lambda answer: f"<|tool_call|>{_listed()(answer)}",
            _framed("Here is my thought process:\n\n", "\n\nHere is my response:\n\n"),
        ),
    ),
    "cohere": Spelling(
        AnswerFormats("cohere", "cohere"),
        _behind(
            _cohere,
            _framed("<|START_THINKING|>", "<|END_THINKING|>", layout=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
        ),
    ),
    "command_r": Spelling(
        AnswerFormats("command_r", "think"),
        _behind(lambda answer: f"Action: ```json\n{_listed('tool_name', 'parameters')(answer)}\n```"),
    ),
    "internlm": Spelling(
        AnswerFormats("internlm", "think"),
        _behind(_each("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters")),
    ),
    "apertus": Spelling(
        AnswerFormats("apertus", "apertus"), _behind(_apertus, _framed("<|inner_prefix|>", "<|inner_suffix|>"))
    ),
    "phi4_mini": Spelling(AnswerFormats("phi4_mini", "think"), _behind(lambda answer: f"functools{_listed()(answer)}")),
    "longcat": Spelling(
        AnswerFormats("longcat", "longcat"),
        _behind(
            _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
            _framed("<longcat_think>\n", "\n</longcat_think>\n"),
        ),
    ),
    "longcat_tags": Spelling(AnswerFormats("longcat", "think"), _behind(_longcat_tags), copies=False),
    "solar_open": Spelling(AnswerFormats("solar_open", "solar_open"), _behind(_solar, _solar_before)),
    "deepseek_v32": Spelling(AnswerFormats("deepseek_v32", "think"), _behind(_dsml("function_calls")), copies=False),
    "deepseek_v4": Spelling(AnswerFormats("deepseek_v4", "think"), _behind(_dsml("tool_calls")), copies=False),
    "hy_v3": Spelling(AnswerFormats("hy_v3", "think"), _behind(_hy3("")), copies=False),
    "hy_v3_opensource": Spelling(
        AnswerFormats("hy_v3_opensource", "hy_v3_opensource"),
        _behind(_hy3(":opensource"), _framed("<think:opensource>", "</think:opensource>")),
        copies=False,
    ),
    "glm4": Spelling(AnswerFormats("glm4", "think"), _behind(_glm4)),
    "olmo3": Spelling(AnswerFormats("olmo3", "think"), _behind(_olmo), copies=False),
    "xlam": Spelling(
        AnswerFormats("xlam", "think"),
        _behind(lambda answer: f"```json\n{_listed()(answer)}\n```" if answer.said else _listed()(answer)),
    ),
    "ernie45": Spelling(
        AnswerFormats("hermes", "ernie45"),
        _behind(
            _each("<tool_call>\n", "\n</tool_call>"),
            _framed("<think>\n", "\n</think>\n\n", layout=("<response>\n", "\n</response>")),
        ),
    ),
    "hunyuan_answer": Spelling(
        AnswerFormats("hunyuan", "hunyuan"),
        _behind(
            lambda answer: f"<tool_calls>{_listed()(answer)}</tool_calls>",
            _framed("<think>\n", "\n</think>\n", layout=("<answer>\n", "\n</answer>")),
        ),
    ),
}
